package controller

import (
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// A broker has one record of a topic's arrivals, which a fit, what is learned of an open
// topic, and a profile share.

// fitted is a record that the tuner has asked a broker for.
type fitted struct {
	begun bool // what was under way before is over
	// Those that the broker has named in it, who answers for each, and which broker forwards.
	publishers, owners, forwarders []string
}

// capture asks for the arrivals of a topic, for so long.
func (s *Session) capture(topic string, lasts time.Duration) {
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Capture{Capture: &srtmv1.CaptureArrivals{
		Topic: topic, Lasts: durationpb.New(lasts),
	}}})
}

// record asks the broker for what is learned from, unless a fit has it record already. Then
// both share the record: one that is learned from anew begins with the names that the broker
// has given.
func (st *state) record(s *Session, of *learned.Topic, topic string, o learned.Order, now time.Time) {
	f := s.fitted[topic]
	switch {
	case f == nil && o.Anew:
		s.capture(topic, 0)
	case f != nil && o.Anew:
		if f.begun {
			st.count(s, of, topic, tuner.Piece{First: true, Publishers: slices.Clone(f.publishers)}, f.owners, f.forwarders, 0, now)
		}
		return
	case f != nil && o.Lasts == 0:
		return
	}
	s.capture(topic, o.Lasts)
}

// count has a piece of a record learned from.
func (st *state) count(s *Session, of *learned.Topic, topic string, piece tuner.Piece, owners, forwarders []string, others uint64, now time.Time) {
	if err := of.Count(s.broker, piece, owners, forwarders, others, now); err != nil {
		st.cfg.Log.Warn("a record of arrivals is not to be trusted", obs.KeyTopic, topic, obs.KeyBroker, s.broker, obs.KeyError, err)
	}
}

// capture does what the tuner wants recorded. A record that is under way for what is learned
// from begins anew, for its publishers have been named.
func (t *tuning) capture(e tuner.Capture) {
	s := e.To.(*Session)
	if e.Lasts == 0 {
		delete(s.fitted, e.Topic)
		if of := t.mu.topics.see(e.Topic).learned; of != nil && t.mu.sessions[s.broker] == s {
			of.Ended(s.broker)
		}
	} else if s.fitted[e.Topic] == nil {
		s.fitted[e.Topic] = new(fitted)
		s.capture(e.Topic, 0)
	}
	s.capture(e.Topic, e.Lasts)
}

// measure has a piece of a broker's record learned from and, if it is also of the one that
// the tuner asked for, taken by the tuner. Requires: mu held.
func (t *tuning) measure(s *Session, a *srtmv1.Arrivals, now time.Time) {
	piece := tuner.Piece{
		First: a.First, Publishers: a.Publishers, Start: mono.Wall(a.StartNs), Gaps: a.GapNs, From: a.Publisher, Lost: a.Lost,
	}
	f := s.fitted[a.Topic]
	if f != nil && a.First {
		*f = fitted{begun: true}
	}
	if f != nil && f.begun {
		f.publishers, f.owners = append(f.publishers, a.Publishers...), append(f.owners, a.Owners...)
		f.forwarders = append(f.forwarders, a.Forwarders...)
	}
	if of := t.mu.topics.see(a.Topic).learned; of != nil {
		t.mu.count(s, of, a.Topic, piece, a.Owners, a.Forwarders, a.Others, now)
	}
	if f == nil || f.begun {
		t.do(t.mu.tuner.Measure(s, s.broker, a.Topic, piece, now))
	}
}
