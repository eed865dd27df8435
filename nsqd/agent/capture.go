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
	// flushEvery is the interval at which pieces of captures are sent.
	flushEvery = 250 * time.Millisecond
	// maxCapture bounds a capture that the loaddistributor does not renew.
	maxCapture = time.Minute
)

// capture starts, extends or ends a capture. The loaddistributor renews a capture while it needs the
// arrivals, so a forgotten capture costs little.
func (o *owner) capture(c *srtmv1.CaptureArrivals, now mono.Time) {
	if o.control == nil {
		return
	}
	lasts := min(max(0, c.GetLasts().AsDuration()), maxCapture)
	_, running := o.captures[c.Topic]
	switch {
	case lasts == 0 && running: // end now, so that a later request starts a new capture
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
		o.flushCapture(c.Topic, false) // the first piece says from when on the record is complete
	}
	o.setFlush(now)
	o.capturing()
}

// flushCaptures sends all recorded arrivals and ends the expired captures.
func (o *owner) flushCaptures(now mono.Time) {
	o.flushed = now
	for _, topic := range slices.Sorted(maps.Keys(o.captures)) {
		o.flushCapture(topic, !now.Before(o.captures[topic]))
	}
	o.setFlush(now)
}

// flushCapture sends the recorded arrivals of a topic. If last is set, flushCapture ends the capture.
func (o *owner) flushCapture(topic string, last bool) {
	behind := o.control.behind()
	if behind && !last {
		return // the arrivals stay in the record
	}
	piece := o.node.Arrivals(topic)
	if last || piece == nil { // piece == nil: the topic is gone
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
		n, lost = 0, lost+n // no later piece can report the loss
	} else {
		o.control.put(queued[srtmv1.BrokerMessage]{
			&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Arrivals{Arrivals: piece}}, int64(n),
		})
	}
	o.metrics.captured.WithLabelValues("sent").Add(float64(n))
	o.metrics.captured.WithLabelValues("lost").Add(float64(lost))
}

// endCaptures ends all captures, as the control session is over.
func (o *owner) endCaptures() {
	for _, topic := range slices.Sorted(maps.Keys(o.captures)) {
		o.node.EndCapture(topic)
		delete(o.captures, topic)
	}
	o.flush.Stop()
	o.metrics.captures.Set(0)
}

// capturing publishes the number of captures.
func (o *owner) capturing() {
	o.metrics.captures.Set(float64(len(o.captures)))
	o.publish()
}

// setFlush sets the timer for the next pieces, or for the first end of a capture.
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
