package controller

import (
	"log/slog"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// A broker has one record of a topic's arrivals. A fit, the learning of an open topic,
// and a profile share the record.

// fitted is a record that the tuner has requested from a broker.
type fitted struct {
	begun bool // the previous record has ended
	// Publishers named by the broker in the record, their owners, and the forwarding
	// brokers.
	publishers, owners, forwarders []string
}

// capture requests the arrivals of a topic for the given time.
func (s *Session) capture(topic string, lasts time.Duration) {
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Capture{Capture: &srtmv1.CaptureArrivals{
		Topic: topic, Lasts: durationpb.New(lasts),
	}}})
}

// record requests a record for learning. If a fit is recording already, both share the
// record: learning that begins again starts with the names that the broker has sent.
func (t *learning) record(s *Session, of *learned.Topic, topic string, o learned.Order, now time.Time) {
	f := s.fitted[topic]
	switch {
	case f == nil && o.Anew:
		s.capture(topic, 0)
	case f != nil && o.Anew:
		if f.begun {
			countPiece(t.cfg.Log, s, of, topic, tuner.Piece{First: true, Publishers: slices.Clone(f.publishers)}, f.owners, f.forwarders, 0, now)
		}
		return
	case f != nil && o.Lasts == 0:
		return
	}
	s.capture(topic, o.Lasts)
}

// countPiece passes a piece of a record to learning.
func countPiece(log *slog.Logger, s *Session, of *learned.Topic, topic string, piece tuner.Piece, owners, forwarders []string, others uint64, now time.Time) {
	if err := of.Count(s.broker, piece, owners, forwarders, others, now); err != nil {
		log.Warn("a record of arrivals is not to be trusted", obs.KeyTopic, topic, obs.KeyBroker, s.broker, obs.KeyError, err)
	}
}

// capture carries out the tuner's request for a record. It restarts a record for
// learning, so that the broker names the publishers again.
func (t *tuning) capture(e tuner.Capture) {
	s := e.To.(*Session)
	if e.Lasts == 0 {
		delete(s.fitted, e.Topic)
		if of := t.topics.peek(e.Topic).learned; of != nil && t.brokers.sessions[s.broker] == s {
			of.Ended(s.broker)
		}
	} else if s.fitted[e.Topic] == nil {
		s.fitted[e.Topic] = new(fitted)
		s.capture(e.Topic, 0)
	}
	s.capture(e.Topic, e.Lasts)
}

// measure passes a piece of a broker's record to learning, and to the tuner if the tuner
// requested the record. Requires: the lock held.
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
	if of := t.topics.peek(a.Topic).learned; of != nil {
		countPiece(t.cfg.Log, s, of, a.Topic, piece, a.Owners, a.Forwarders, a.Others, now)
	}
	if f == nil || f.begun {
		t.do(t.tuner.Measure(s, s.broker, a.Topic, piece, now))
	}
}
