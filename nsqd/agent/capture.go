package agent

import (
	"maps"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
)

const (
	// flushEvery is how often the pieces of captures are sent.
	flushEvery = 250 * time.Millisecond
	// maxCapture is how long a capture lasts that is not asked for again.
	maxCapture = time.Minute
)

// capture begins a capture, moves its end, or ends it. The loaddistributor asks
// again for as long as it wants one: if it forgets, that costs us little.
func (o *owner) capture(c *srtmv1.CaptureArrivals, now mono.Time) {
	if o.control == nil {
		return
	}
	lasts := min(max(0, c.GetLasts().AsDuration()), maxCapture)
	_, running := o.captures[c.Topic]
	switch {
	case lasts == 0 && running: // at once, so that one that is asked for next begins anew
		o.flushCapture(c.Topic, true)
		o.setFlush(now)
		return
	case lasts == 0:
		return
	case !running:
		if !o.node.Capture(c.Topic) {
			o.cfg.Log.Debug("no topic to capture the arrivals of", obs.KeyTopic, c.Topic)
			return
		}
		o.cfg.Log.Debug("arrivals are being captured", obs.KeyTopic, c.Topic, obs.KeyDuration, lasts)
		if len(o.captures) == 0 {
			o.flushed = now
		}
	}
	o.captures[c.Topic] = now.Add(lasts)
	if !running {
		o.flushCapture(c.Topic, false) // says from when on the record is whole
	}
	o.setFlush(now)
	o.capturing()
}

// flushCaptures sends what was recorded, and ends what is over.
func (o *owner) flushCaptures(now mono.Time) {
	o.flushed = now
	for _, topic := range slices.Sorted(maps.Keys(o.captures)) {
		o.flushCapture(topic, !now.Before(o.captures[topic]))
	}
	o.setFlush(now)
}

// flushCapture sends what was recorded of one; last: it is over.
func (o *owner) flushCapture(topic string, last bool) {
	behind := o.control.behind()
	if behind && !last {
		return // the record keeps it
	}
	piece := o.node.Arrivals(topic)
	if last || piece == nil { // or the topic is gone
		o.node.EndCapture(topic)
		delete(o.captures, topic)
		o.cfg.Log.Debug("arrivals are not captured any more", obs.KeyTopic, topic)
		o.capturing()
	}
	if piece == nil {
		return
	}
	n, lost := len(piece.GapNs), int(piece.Lost)
	if behind {
		n, lost = 0, lost+n // and there is no next piece to say so
	} else {
		o.control.put(queued[srtmv1.BrokerMessage]{
			&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Arrivals{Arrivals: piece}}, int64(n),
		})
	}
	o.metrics.captured.WithLabelValues("sent").Add(float64(n))
	o.metrics.captured.WithLabelValues("lost").Add(float64(lost))
}

// endCaptures ends all of them: the control session is gone.
func (o *owner) endCaptures() {
	for _, topic := range slices.Sorted(maps.Keys(o.captures)) {
		o.node.EndCapture(topic)
		delete(o.captures, topic)
	}
	o.flush.Stop()
	o.metrics.captures.Set(0)
}

// capturing shows how many there are.
func (o *owner) capturing() {
	o.metrics.captures.Set(float64(len(o.captures)))
	o.publish()
}

// setFlush sets the timer for the next pieces, or for the first end.
func (o *owner) setFlush(now mono.Time) {
	o.flush.Stop()
	if len(o.captures) == 0 {
		return
	}
	at := o.flushed.Add(flushEvery)
	for _, until := range o.captures {
		at = min(at, until)
	}
	o.flush.Reset(max(0, at.Sub(now)))
}
