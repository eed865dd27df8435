package controller

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// A broker has one record of a topic's arrivals, which a fit, what is learned of an open
// topic, and a profile share. Session.fitted says of which topics the tuner has asked for
// it where it was being recorded already, and whether it has begun anew since: what comes
// before is of publishers that were named before.

// capture asks for the arrivals of a topic, for so long.
func (s *Session) capture(topic string, lasts time.Duration) {
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Capture{Capture: &srtmv1.CaptureArrivals{
		Topic: topic, Lasts: durationpb.New(lasts),
	}}})
}

// record asks the broker for what is learned from, unless a fit has it record already. A
// profile cannot wait for the end of the fit: its record begins anew, and the fit's with it.
func (s *Session) record(topic string, o learned.Order, profiled bool) {
	if _, fitted := s.fitted[topic]; fitted && (o.Anew || o.Lasts == 0) {
		if !profiled {
			return
		}
		s.fitted[topic] = false
	}
	if o.Anew {
		s.capture(topic, 0)
	}
	s.capture(topic, o.Lasts)
}

// capture does what the tuner wants recorded. A record that is under way for what is learned
// from begins anew, for its publishers have been named.
func (t *tuning) capture(e tuner.Capture) {
	s, of := e.To.(*Session), t.mu.topics.see(e.Topic).learned
	if of != nil {
		if e.Lasts == 0 {
			delete(s.fitted, e.Topic)
			of.Ended(s.broker)
		} else if _, fitted := s.fitted[e.Topic]; !fitted {
			s.fitted[e.Topic] = false
			s.capture(e.Topic, 0)
		}
	}
	s.capture(e.Topic, e.Lasts)
}

// measure has a piece of a broker's record learned from and, if it is also of the one that
// the tuner asked for, taken by the tuner. Requires: the lock held.
func (t *tuning) measure(s *Session, a *srtmv1.Arrivals, now time.Time) {
	piece := tuner.Piece{
		First: a.First, Publishers: a.Publishers, Start: mono.Wall(a.StartNs), Gaps: a.GapNs, From: a.Publisher, Lost: a.Lost,
	}
	if of := t.mu.topics.see(a.Topic).learned; of != nil {
		if err := of.Count(s.broker, piece, a.Owners, a.Others, now); err != nil {
			t.cfg.Log.Warn("a record of arrivals is not to be trusted", obs.KeyTopic, a.Topic, obs.KeyBroker, s.broker, obs.KeyError, err)
		}
	}
	begun, fitted := s.fitted[a.Topic]
	if fitted && a.First {
		begun, s.fitted[a.Topic] = true, true
	}
	if begun || !fitted {
		t.do(t.mu.tuner.Measure(s, s.broker, a.Topic, piece, now))
	}
}
