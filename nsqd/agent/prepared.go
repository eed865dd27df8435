package agent

import (
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// A PrepareTopic is answered when the topic will be the same after a crash. The owner does not
// wait for the disk meanwhile: one record has the topics of all PrepareTopics that have come by
// then.

// prepared is a topic whose PrepareTopic is carried out and not answered.
type prepared struct {
	link    *controlLink
	request uint64
	topic   string
	created bool                   // the topic was not there before
	changed bool                   // since it was last recorded
	unknown []*srtmv1.TopicChannel // channels that the control plane does not know
}

// preparing are the PrepareTopics that are not answered.
type preparing struct {
	waiting   []prepared // for a record that has not begun
	recording bool       // one runs
}

// answerPrepared answers a PrepareTopic once that is recorded. A topic that cannot be recorded is
// as it was before.
func (o *owner) answerPrepared(p prepared) {
	for _, earlier := range o.waiting {
		if earlier.topic == p.topic {
			p.created = p.created || earlier.created
			p.changed = p.changed || earlier.changed
		}
	}
	if !p.changed && !o.recording {
		o.resultWith(p.link, p.request, p.unknown, nil)
		return
	}
	o.waiting = append(o.waiting, p)
	o.record()
}

// record records all that waits, unless a record runs.
func (o *owner) record() {
	if o.recording || len(o.waiting) == 0 {
		return
	}
	batch := o.waiting
	o.waiting, o.recording = nil, true
	o.sessions.Go(func() {
		err := o.node.Recorded()
		o.do(o.ctx, func(o *owner) {
			o.recording = false
			o.recorded(batch, err)
			o.record()
		})
	})
}

func (o *owner) recorded(batch []prepared, err error) {
	for _, p := range batch {
		fault := err
		if !p.changed {
			fault = nil
		}
		if fault != nil && p.created && !o.decidedNext(p) {
			o.node.Undo(p.topic)
			if !o.node.Has(p.topic) {
				o.holdings.Missing(p.topic)
				o.save(p.topic)
			}
		}
		o.resultWith(p.link, p.request, p.unknown, fault)
	}
}

// decidedNext reports whether another PrepareTopic of the topic waits for the next record: that
// decides what becomes of the topic.
func (o *owner) decidedNext(p prepared) (is bool) {
	for i := range o.waiting {
		if next := &o.waiting[i]; next.topic == p.topic {
			next.created, next.changed, is = true, true, true
		}
	}
	return is
}
