package controller

import (
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// recording is what brokers say of a topic's arrivals while it is being fitted, or
// while one of them is suspected of being overloaded.
// Guarded by Controller.mu.
type recording struct {
	began time.Time
	trace *tuner.Trace
	// When each session was asked last.
	asked map[*Session]time.Time
	// Sessions that said what cannot be: they are not asked again, nor listened to.
	untrusted map[*Session]bool
	told      bool // the search has had some of it
}

func newRecording(topic catalog.Topic, now time.Time) *recording {
	return &recording{began: now, trace: tuner.NewTrace(wall(now), topic.Placement.Index), asked: map[*Session]time.Time{}, untrusted: map[*Session]bool{}}
}

const (
	// recordFor is what a broker is asked for at a time, recordAgain when it is
	// asked again, and recordBegin where it has not begun to speak: it had not
	// created the topic then.
	recordFor   = 20 * time.Second
	recordAgain = 5 * time.Second
	recordBegin = 250 * time.Millisecond
	// recordPatience is how long brokers have to begin to speak, and after that to
	// have said something, before their topic is fitted without.
	recordPatience = 1500 * time.Millisecond
)

// recordLocked asks the brokers that the topic's publishers send to, or may soon,
// for arrivals. Requires: mu held.
func (c *Controller) recordLocked(topic catalog.Topic, f *fit, now time.Time) {
	if f.record == nil {
		f.record = newRecording(topic, now)
	}
	c.askArrivalsLocked(f.record, topic.Spec.Name(), topic.Holders(), now)
	if f.search == nil {
		f.record.trace.Skip(wall(now)) // nobody takes it yet
	}
}

// askArrivalsLocked asks brokers again whenever that is due. Requires: mu held.
func (c *Controller) askArrivalsLocked(r *recording, topic string, brokers []string, now time.Time) {
	r.trace.Expect(brokers, wall(now))
	for _, id := range brokers {
		s := c.mu.sessions[id]
		if s == nil || r.untrusted[s] {
			continue
		}
		again := recordAgain
		if !r.trace.Begun(id) {
			again = recordBegin
		}
		if asked, known := r.asked[s]; !known || now.Sub(asked) >= again {
			r.asked[s] = now
			s.askArrivals(topic, recordFor)
		}
	}
}

// records reports whether arrivals are being recorded for the fit.
func (f *fit) records() bool { return f != nil && f.record != nil }

// stopRecordingLocked ends it on all brokers. Requires: mu held.
func (c *Controller) stopRecordingLocked(name string, f *fit) {
	if f.record == nil {
		return
	}
	c.endArrivalsLocked(f.record, name)
	c.fitFigures.count(f.record.trace.Counts())
	f.record = nil
}

// endArrivalsLocked requires mu held.
func (c *Controller) endArrivalsLocked(r *recording, topic string) {
	for s := range r.asked {
		if c.mu.sessions[s.broker] == s {
			s.askArrivals(topic, 0)
		}
	}
}

func (s *Session) askArrivals(topic string, lasts time.Duration) {
	s.out.Put(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Capture{Capture: &srtmv1.CaptureArrivals{
		Topic: topic, Lasts: durationpb.New(lasts),
	}}})
}

// starting reports whether brokers that have just been asked may still begin to
// speak.
func (r *recording) starting(topic catalog.Topic, now time.Time) bool {
	return now.Sub(r.began) < recordPatience && !r.begun(topic)
}

// dry reports whether nothing is to be expected of the recording, so long after the
// search began.
func (r *recording) dry(topic catalog.Topic, after time.Duration) bool {
	return !r.begun(topic) || after > recordPatience
}

func (r *recording) begun(topic catalog.Topic) bool {
	return !slices.ContainsFunc(topic.Plan.Quotas, func(q placement.Quota) bool { return !r.trace.Begun(q.Broker) })
}

// arrivals takes a piece of a broker's record. What is wrong with it ends the
// recording on that broker, and nothing else.
func (c *Controller) arrivals(s *Session, a *srtmv1.Arrivals, now time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.sessions[s.broker] != s {
		return ErrReplaced
	}
	var r *recording
	if f := c.mu.fits[a.Topic]; f != nil && f.record != nil {
		r = f.record
	} else if q := c.mu.probes[a.Topic]; q != nil {
		r = q.record
	}
	if r == nil || r.asked[s].IsZero() || r.untrusted[s] {
		return nil // it is over
	}
	err := r.trace.Add(s.broker, tuner.Piece{
		First: a.First, Publishers: a.Publishers, Start: mono.Wall(a.StartNs), Gaps: a.GapNs, From: a.Publisher, Lost: a.Lost,
	}, wall(now))
	if err != nil {
		r.untrusted[s] = true
		s.askArrivals(a.Topic, 0)
		c.cfg.Log.Warn("a record of arrivals is not to be trusted", obs.KeyTopic, a.Topic, obs.KeyBroker, s.broker, obs.KeyError, err)
	}
	return nil
}
