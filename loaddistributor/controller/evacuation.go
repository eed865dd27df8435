package controller

import (
	"errors"
	"slices"
	"sync"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// DefaultEvacuateAfter is how long a broker may be disconnected before its publishers are
// placed elsewhere.
const DefaultEvacuateAfter = 3 * time.Second

// returnWithin is the time for brokers to connect to a new loaddistributor: the longest
// pause between two attempts of an agent.
const returnWithin = 8 * time.Second

// moveRetry is the pause after a topic could not move away from a broker.
const moveRetry = 5 * time.Second

// mover moves topics without a request: away from brokers that drain or are gone, and
// publishers without a broker to a broker. run, settle and forced acquire the lock; the
// other methods require it.
type mover struct {
	// Set once.
	cfg     *Config
	mu      *sync.RWMutex
	cat     *pipeline
	brokers *brokers
	topics  *topics
	tuner   *tuner.Tuner
	terms   *terms
	owners  *owners
}

// run moves topics away from brokers that drain or have been disconnected for too long,
// and retires emptied brokers.
func (m *mover) run(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range m.cat.committed.Brokers() {
		names := m.cat.committed.Retiring(b.ID)
		if m.mustEmpty(b, now) {
			names = m.cat.committed.Placed(b.ID)
		}
		for _, name := range names {
			topic, _ := m.cat.committed.Topic(name)
			if !topic.Open() || m.topics.owned(name) { // two brokers of a topic are handled one after the other
				continue
			}
			if op, due := m.nextOperation(topic, b, now); due {
				m.owners.enqueue(op)
			}
		}
	}
	for _, name := range m.topics.busy {
		if l := m.topics.byName[name]; l != nil && now.After(l.retry) {
			l.retry, l.moveErr = time.Time{}, nil // the topic need not leave any more
		}
	}
}

// mustEmpty reports whether topics must leave a broker, and records when the broker
// disconnected.
func (m *mover) mustEmpty(b catalog.Broker, now time.Time) bool {
	if decided, _ := m.cat.next.Broker(b.ID); !decided.Draining {
		delete(m.brokers.drainers, b.ID)
	}
	switch since, disconnected := m.brokers.disconnectedSince[b.ID]; {
	case b.Connected:
		delete(m.brokers.disconnectedSince, b.ID)
	case !disconnected:
		m.brokers.disconnectedSince[b.ID] = now
	case now.Sub(since) >= m.cfg.EvacuateAfter:
		return true
	}
	return b.Draining
}

// nextOperation returns the operation that is due, if any, for a topic on a broker that it has left
// or must leave.
func (m *mover) nextOperation(topic catalog.Topic, b catalog.Broker, now time.Time) (op operation, due bool) {
	name := topic.Spec.Name()
	if !slices.Contains(topic.Retiring, b.ID) {
		l := m.topics.entry(name)
		if now.Before(l.retry) {
			return operation{}, false
		}
		l.retry = now.Add(moveRetry)
		return m.moveOff(name, b), true
	}
	taker := m.taker(topic, b, now)
	switch {
	case taker != "":
		m.recordTakeOver(name, b.ID, taker)
		return operation{name: name, target: reconcile.Target{Retire: b.ID, TakenOverBy: taker}}, true
	case m.emptied(topic, b.ID, now):
		return m.retire(name, b.ID, false), true
	case m.brokers.untaken(name, b, now):
		return m.retire(name, b.ID, true), true
	}
	m.linger(topic, b.ID, now)
	return operation{name: name, target: reconcile.Target{Shared: true}}, m.terms.takesTurns(topic)
}

// emptied reports whether a broker that the topic has left has nothing of the topic,
// according to a report after the move.
func (m *mover) emptied(topic catalog.Topic, id string, now time.Time) bool {
	s := m.brokers.sessions[id]
	if s == nil || s.reports.Count() < 2 {
		return false
	}
	name := topic.Spec.Name()
	if !s.reports.Has(name) { // the report lists all topics of the broker
		return !m.takesOver(topic) // otherwise the topic stays until a taker has ended the take-over
	}
	t := s.reports.Topic(name)
	if t == nil {
		return false
	}
	last := t.Newest()
	// Require an interval without activity, so that messages in flight when the
	// connections ended have been counted.
	r := last.Stats
	return r.Backlog == 0 && r.Depth == 0 && r.Publishers == 0 && r.Offered == 0 && r.Delivered == 0 &&
		now.Sub(last.At) <= m.cfg.Window
}

// linger arranges a reminder for a broker that the topic has left, if publishers are
// still connected there.
func (m *mover) linger(topic catalog.Topic, id string, now time.Time) {
	name := topic.Spec.Name()
	t, l := m.brokers.reported(id).Topic(name), m.topics.entry(name)
	if t == nil || t.Newest().Stats.Publishers == 0 ||
		slices.ContainsFunc(l.reminders, func(r reminder) bool { return r.broker == id }) {
		return
	}
	ids := make([]string, topic.Placement.Len())
	for i := range ids {
		ids[i] = topic.Placement.At(i).Publisher
	}
	l.reminders = append(l.reminders, reminder{id, ids, now.Add(remindAfter)})
}

// retire makes an emptied broker remove the topic. If messages have arrived since the
// report, for example over HTTP, the broker keeps the topic, and gets the order again later.
// With forced the broker removes the topic in any case. After a crash in between, the
// broker no longer lists the topic, which counts as empty.
func (m *mover) retire(name, id string, forced bool) operation {
	if forced {
		m.brokers.logLost(name, id)
	}
	return operation{name: name, target: reconcile.Target{Retire: id, Forced: forced}}
}

// moveOff moves a topic to allowed brokers, because of one broker.
func (m *mover) moveOff(name string, gone catalog.Broker) operation {
	reason := cause{reason: srtmv1.MoveReason_MOVE_REASON_CRASH, text: "broker " + gone.ID + " is gone"}
	if gone.Draining {
		reason = cause{srtmv1.MoveReason_MOVE_REASON_DRAIN, "broker " + gone.ID + " drains", m.brokers.drainers[gone.ID]}
	}
	op := moving(name, reason, func(p planning) (*catalog.Spec, placement.Plan, error) {
		if !slices.ContainsFunc(p.topic.Plan.Quotas, func(q placement.Quota) bool {
			return !slices.ContainsFunc(p.brokers, func(b placement.Broker) bool { return b.ID == q.Broker })
		}) {
			return nil, placement.Plan{}, reconcile.ErrSettled // the broker is back
		}
		plan, err := p.replaceAsWide(p.topic.Spec, nil)
		if errors.As(err, new(*placement.Infeasible)) && m.forced(p.topic) {
			plan, err = p.overcommitted(p.topic.Spec)
		}
		return p.topic.Spec, plan, err
	})
	op.end = func(err error) {
		m.mu.Lock()
		m.topics.entry(name).moveErr = err
		m.mu.Unlock()
		if errors.As(err, new(*placement.Infeasible)) {
			m.cfg.Log.Warn("cannot move the topic from a broker that drains or is disconnected; retrying later", obs.KeyTopic, name, obs.KeyError, err)
		}
	}
	return op
}

// forced reports whether a broker of the topic drains by force.
func (m *mover) forced(topic catalog.Topic) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.ContainsFunc(topic.Plan.Quotas, func(q placement.Quota) bool {
		b, _ := m.cat.next.Broker(q.Broker)
		return b.Forced
	})
}

// settle places publishers that a fit has left without a broker, because the fit ended,
// was interrupted, or belonged to an earlier leader. It prefers the brokers of the topic,
// if the rates fit: late messages are better than silent publishers.
func (m *mover) settle(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range m.topics.busy {
		l := m.topics.byName[name]
		if l == nil || l.owner != nil || now.Before(l.retry) || l.condition == nil || l.condition.Stranded == 0 {
			continue
		}
		topic, _ := m.cat.committed.Topic(name)
		status := m.tuner.Status(name, now)
		if !topic.Open() || topic.Placement.Unplaced() == 0 || status.Running {
			continue
		}
		l.retry = now.Add(moveRetry)
		reason := cause{reason: srtmv1.MoveReason_MOVE_REASON_TAKE_OVER, text: "publishers have no place"}
		if status.Step != "" { // this process ran the fit
			reason.reason = srtmv1.MoveReason_MOVE_REASON_FIT
		}
		m.owners.enqueue(moving(name, reason, func(p planning) (*catalog.Spec, placement.Plan, error) {
			if p.topic.Placement.Unplaced() == 0 {
				return nil, placement.Plan{}, reconcile.ErrSettled
			}
			plan, err := p.replaceAsWide(p.topic.Spec, nil)
			return p.topic.Spec, plan, err
		}))
	}
}

// If a broker is gone, its messages of a replicated topic are not lost: another broker
// takes them over. Able brokers get the order in turn.

// takersTurn is the time for one broker to take a topic over before the next broker gets
// the order.
const takersTurn = 30 * time.Second

// takesOver reports whether brokers take over the topic's messages.
func (m *mover) takesOver(topic catalog.Topic) bool {
	return topic.Spec.Durability == catalog.DurabilityReplicated && m.cfg.TakeOverAfter >= 0
}

// taker returns the broker that now takes over a replicated topic from a broker that
// is gone or may be gone; "": none.
func (m *mover) taker(topic catalog.Topic, gone catalog.Broker, now time.Time) string {
	if !m.takesOver(topic) {
		return ""
	}
	if s := m.brokers.sessions[gone.ID]; s != nil {
		if s.mayHave(topic.Spec.Name()) {
			return ""
		} // else the broker is back, and another broker has begun the take-over
	} else if since, disconnected := m.brokers.disconnectedSince[gone.ID]; !disconnected || now.Sub(since) < m.cfg.TakeOverAfter {
		return ""
	}
	var able []string
	for _, id := range topic.Plan.Brokers() {
		if s := m.brokers.sessions[id]; s != nil && s.durability == catalog.DurabilityReplicated {
			able = append(able, id)
		}
	}
	if len(able) == 0 || m.unfinished(topic, gone.ID) {
		return ""
	}
	// Not Sub: for a connected broker disconnectedSince is zero, and Sub would saturate.
	turn := (now.Unix() - m.brokers.disconnectedSince[gone.ID].Unix()) / int64(takersTurn/time.Second)
	return able[turn%int64(len(able))]
}

// takeOver is a take-over: the broker that got the order, and when the former broker
// disconnected.
type takeOver struct {
	broker       string
	disconnected time.Time
}

// recordTakeOver records that a broker got the order.
func (m *mover) recordTakeOver(topic, gone, broker string) {
	l := m.topics.entry(topic)
	if l.takeOvers == nil {
		l.takeOvers = map[string]takeOver{}
	}
	l.takeOvers[gone] = takeOver{broker, m.brokers.disconnectedSince[gone]}
}

// unfinished reports whether the broker that got the order, and may have part of the
// messages, is itself gone. Its messages are taken over first, to keep each publisher's
// order.
func (m *mover) unfinished(topic catalog.Topic, gone string) bool {
	t := m.topics.peek(topic.Spec.Name()).takeOvers[gone]
	return t.broker != "" && t.disconnected.Equal(m.brokers.disconnectedSince[gone]) && m.brokers.sessions[t.broker] == nil && slices.Contains(topic.Holders(), t.broker)
}

// mayHave reports whether the broker has or may have the topic.
func (s *Session) mayHave(topic string) bool {
	return s.reports.Count() < 2 || s.reports.Has(topic)
}

// withoutTakenOver removes brokers whose part of a replicated topic must be taken over. Until then
// they cannot be members again.
func (bs *brokers) withoutTakenOver(brokers []placement.Broker, topic catalog.Topic) []placement.Broker {
	if topic.Spec == nil || topic.Spec.Durability != catalog.DurabilityReplicated {
		return brokers
	}
	return slices.DeleteFunc(brokers, func(b placement.Broker) bool {
		s := bs.sessions[b.ID]
		return slices.Contains(topic.Retiring, b.ID) && (s == nil || !s.mayHave(topic.Spec.Name()))
	})
}
