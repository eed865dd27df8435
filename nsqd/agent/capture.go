package agent

import (
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
)

const (
	// flushEvery is the interval at which pieces of captures are sent. A topic that was quiet is looked at
	// at every second time.
	flushEvery = 250 * time.Millisecond
	// maxCapture bounds a capture that the loaddistributor does not renew.
	maxCapture = time.Minute
	// maxQuiet is the maximum number of quiet topics in a message.
	maxQuiet = 1000
)

// captureState is the state of a topic's capture.
type captureState struct {
	until mono.Time // end of the capture
	quiet bool      // the topic had no arrivals at the last look
}

// capture starts, extends or ends captures. The loaddistributor renews a capture while it needs the
// arrivals, so a forgotten capture costs little.
func (o *owner) capture(m *srtmv1.CaptureArrivals, now mono.Time) {
	if o.control == nil {
		return
	}
	lasts := min(max(0, m.GetLasts().AsDuration()), maxCapture)
	if m.Topic != "" {
		o.captureTopic(m.Topic, lasts, now)
	}
	for _, topic := range m.Topics {
		o.captureTopic(topic, lasts, now)
	}
}

func (o *owner) captureTopic(topic string, lasts time.Duration, now mono.Time) {
	c := o.captures[topic]
	switch {
	case lasts == 0 && c != nil: // end now, so that a later request starts a new capture
		o.flushCapture(topic, true)
		return
	case lasts == 0:
		return
	case c != nil:
		c.until = now.Add(lasts)
		return
	case !o.node.Capture(topic):
		o.cfg.Log.Debug("no topic to capture the arrivals of", obs.KeyTopic, topic)
		return
	}
	o.cfg.Log.Debug("arrivals are being captured", obs.KeyTopic, topic, obs.KeyDuration, lasts)
	o.captures[topic] = &captureState{until: now.Add(lasts)}
	if len(o.captures) == 1 {
		o.flush.Reset(flushEvery)
	}
	o.flushCapture(topic, false) // the first piece reports from when on the record is complete
	o.metrics.captures.Set(float64(len(o.captures)))
}

// flushCaptures sends all recorded arrivals and ends the expired captures.
func (o *owner) flushCaptures(now mono.Time) {
	o.flushes++
	var quiet []string
	// order: each topic by itself
	for topic, c := range o.captures {
		last := !now.Before(c.until)
		if c.quiet && !last && o.flushes%2 == 0 {
			continue
		}
		if c.quiet = o.flushCapture(topic, last); c.quiet {
			quiet = append(quiet, topic)
		}
	}
	slices.Sort(quiet)
	for topics := range slices.Chunk(quiet, maxQuiet) {
		if !o.control.behind() {
			o.control.put(queued[srtmv1.BrokerMessage]{
				&srtmv1.BrokerMessage{Message: &srtmv1.BrokerMessage_Arrivals{Arrivals: &srtmv1.Arrivals{Quiet: topics}}}, int64(len(topics)),
			})
		}
	}
	if o.flush.Stop(); len(o.captures) > 0 {
		o.flush.Reset(flushEvery)
	}
}

// flushCapture sends the recorded arrivals of a topic. If last is set, flushCapture ends the capture. If
// the topic is quiet, flushCapture sends nothing and returns true.
func (o *owner) flushCapture(topic string, last bool) (quiet bool) {
	behind := o.control.behind()
	if behind && !last {
		return false // the arrivals stay in the record
	}
	piece := o.node.Arrivals(topic)
	if last || piece == nil { // piece == nil: the topic is gone
		o.node.EndCapture(topic)
		delete(o.captures, topic)
		o.cfg.Log.Debug("arrivals are not captured any more", obs.KeyTopic, topic)
		o.metrics.captures.Set(float64(len(o.captures)))
	}
	switch {
	case piece == nil:
		return false
	case !piece.First && len(piece.GapNs) == 0 && len(piece.Publishers) == 0 && piece.Lost == 0:
		return true
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
	return false
}

// endCaptures ends all captures, as the control session is over.
func (o *owner) endCaptures() {
	// order: each topic by itself
	for topic := range o.captures {
		o.node.EndCapture(topic)
	}
	clear(o.captures)
	o.flush.Stop()
	o.metrics.captures.Set(0)
}
