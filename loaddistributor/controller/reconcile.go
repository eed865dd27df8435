package controller

import (
	"errors"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
)

// DefaultEvacuateAfter is how long a broker may be away before its publishers
// are placed elsewhere.
const DefaultEvacuateAfter = 3 * time.Second

// returnWithin is how long brokers may take to call a loaddistributor that has started:
// the longest pause between two attempts of an agent.
const returnWithin = 8 * time.Second

// moveRetry is how long a topic that could not be moved away from a broker is
// left alone.
const moveRetry = 5 * time.Second

// Calibrate gives a broker an mcap, msg/s, that stands over the one it says hello
// with; 0 ends that. catalog.ErrBrokerUnknown if there is none.
func (c *Controller) Calibrate(id string, mcap int64) (catalog.Broker, error) {
	return c.setBroker(id, catalog.BrokerCalibrated{ID: id, Mcap: mcap})
}

// setBroker commits an event of a broker and returns the broker.
func (c *Controller) setBroker(id string, e catalog.Event) (catalog.Broker, error) {
	if err := c.mu.following(); err != nil {
		return catalog.Broker{}, err
	}
	if err := c.mu.commit(e); err != nil {
		return catalog.Broker{}, err
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	b, _ := c.mu.cat.Broker(id)
	return b, nil
}

// BrokerTopics returns the topics that are placed on the broker or have left
// messages there, by name.
func (r *reader) BrokerTopics(id string) []string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.mu.cat.Placed(id)
}

// reconcile moves topics away from brokers that drain or have been away for too
// long, and retires those that have been emptied.
func (c *Controller) reconcile(now time.Time) {
	var due []operation
	c.mu.Lock()
	for _, b := range c.mu.cat.Brokers() {
		leave := b.Draining
		if !b.Draining {
			delete(c.mu.drainers, b.ID)
		}
		switch since, away := c.mu.away[b.ID]; {
		case b.Connected:
			delete(c.mu.away, b.ID)
		case !away:
			c.mu.away[b.ID] = now
		default:
			leave = leave || now.Sub(since) >= c.cfg.EvacuateAfter
		}
		names := c.mu.cat.Retiring(b.ID)
		if leave {
			names = c.mu.cat.Placed(b.ID)
		}
		for _, name := range names {
			topic, _ := c.mu.cat.Topic(name)
			switch {
			case !topic.Open() || c.mu.owned(name):
			case slices.Contains(topic.Retiring, b.ID):
				taker := c.mu.taker(topic, b, now)
				switch {
				case taker != "":
					c.mu.takes(name, b.ID, taker)
					due = append(due, operation{name: name, target: reconcile.Target{Retire: b.ID, By: taker}})
				case c.mu.emptied(topic, b.ID, now):
					due = append(due, c.mu.retire(name, b.ID, false))
				case c.mu.untaken(topic, b, now):
					due = append(due, c.mu.retire(name, b.ID, true))
				default:
					c.mu.linger(topic, b.ID, now)
					if c.mu.takesTurns(topic) {
						due = append(due, operation{name: name, target: reconcile.Target{Shared: true}})
					}
				}
			case !now.Before(c.mu.topics.see(name).retry):
				c.mu.topics.at(name).retry = now.Add(moveRetry)
				due = append(due, c.leave(name, b))
			}
		}
	}
	for _, name := range c.mu.wanting {
		if l := c.mu.topics[name]; l != nil && now.After(l.retry) {
			l.retry, l.stays = time.Time{}, nil // it need not leave any more
		}
	}
	for _, op := range due {
		if !c.mu.owned(op.name) && !c.mu.closing { // two brokers of one topic: one after the other
			c.owners.want(op)
		}
	}
	c.mu.Unlock()
}

// emptied reports whether a broker that the topic moved away from has nothing of it, by a
// report of after the move.
func (st *state) emptied(topic catalog.Topic, id string, now time.Time) bool {
	s := st.sessions[id]
	if s == nil || s.reports.Count() < 2 {
		return false
	}
	name := topic.Spec.Name()
	if !s.reports.Has(name) {
		return true // it lists all it has
	}
	t := s.reports.Topic(name)
	if t == nil {
		return false
	}
	last := t.Newest()
	r := last.Stats
	// An interval without anything, so that what was on its way when the
	// connections ended has been counted.
	return r.Backlog == 0 && r.Depth == 0 && r.Publishers == 0 && r.Offered == 0 && r.Delivered == 0 &&
		now.Sub(last.At) <= st.cfg.Window
}

// takers is how long one broker is asked to take a topic over before it is another's turn.
const takersTurn = 30 * time.Second

// taker returns the broker that is to take over what one that is gone, or may be, has of a
// replicated topic; "": none, or not now.
func (st *state) taker(topic catalog.Topic, gone catalog.Broker, now time.Time) string {
	if topic.Spec.Durability != catalog.DurabilityReplicated || st.cfg.TakeOverAfter < 0 {
		return ""
	}
	since, away := st.away[gone.ID]
	switch s := st.sessions[gone.ID]; {
	case s != nil: // back without the topic: another has begun to take it over
		if s.has(topic.Spec.Name()) {
			return ""
		}
	case !away || now.Sub(since) < st.cfg.TakeOverAfter:
		return ""
	}
	var able []string
	for _, id := range topic.Plan.Brokers() {
		if s := st.sessions[id]; s != nil && s.durability == catalog.DurabilityReplicated {
			able = append(able, id)
		}
	}
	if len(able) == 0 || st.unfinished(topic, gone.ID) {
		return ""
	}
	return able[int(now.Sub(since)/takersTurn)%len(able)]
}

// taking is a take-over that a broker was asked for, of what one had that is away since then.
type taking struct {
	by   string
	away time.Time
}

// takes notes that a broker is asked to take over what another had.
func (st *state) takes(topic, gone, by string) {
	l := st.topics.at(topic)
	if l.taking == nil {
		l.taking = map[string]taking{}
	}
	l.taking[gone] = taking{by, st.away[gone]}
}

// unfinished reports whether who was to take over what a broker had, and may have got the
// beginning of it, is gone itself: then that is taken over first, so that what each
// publisher sent stays in order.
func (st *state) unfinished(topic catalog.Topic, gone string) bool {
	t := st.topics.see(topic.Spec.Name()).taking[gone]
	return t.by != "" && t.away.Equal(st.away[gone]) && st.sessions[t.by] == nil && slices.Contains(topic.Holders(), t.by)
}

// has reports whether the broker has the topic, or may.
func (s *Session) has(topic string) bool {
	return s.reports.Count() < 2 || s.reports.Has(topic)
}

// without leaves out brokers whose part of a replicated topic is to be taken over: until
// then, they cannot have it anew.
func (st *state) without(brokers []placement.Broker, topic catalog.Topic) []placement.Broker {
	if topic.Spec == nil || topic.Spec.Durability != catalog.DurabilityReplicated {
		return brokers
	}
	return slices.DeleteFunc(brokers, func(b placement.Broker) bool {
		s := st.sessions[b.ID]
		return slices.Contains(topic.Retiring, b.ID) && (s == nil || !s.has(topic.Spec.Name()))
	})
}

// retire has an emptied broker remove the topic, unless something has come since its
// report, over HTTP say: then it stays, to be asked again; forced, whatever it holds. After
// a crash in the middle the broker does not list the topic any more, which is as good as a
// report of nothing.
func (st *state) retire(name, id string, forced bool) operation {
	if t := st.reported(id).Topic(name); forced && t != nil {
		last := t.Newest().Stats
		st.cfg.Log.Warn("messages that no consumer takes are lost with a drain by force", obs.KeyTopic, name, obs.KeyBroker, id, obs.KeyCount, last.Depth+last.Backlog)
	}
	return operation{name: name, target: reconcile.Target{Retire: id, Forced: forced}}
}

// leave moves a topic to where it may be, because of one broker. Requires: mu held.
func (c *Controller) leave(name string, because catalog.Broker) operation {
	why := cause{reason: srtmv1.MoveReason_MOVE_REASON_CRASH, why: "broker " + because.ID + " is gone"}
	if because.Draining {
		why = cause{srtmv1.MoveReason_MOVE_REASON_DRAIN, "broker " + because.ID + " drains", c.mu.drainers[because.ID]}
	}
	op := moving(name, why, func(p planning) (*catalog.Spec, placement.Plan, error) {
		if !slices.ContainsFunc(p.topic.Plan.Quotas, func(q placement.Quota) bool {
			return !slices.ContainsFunc(p.brokers, func(b placement.Broker) bool { return b.ID == q.Broker })
		}) {
			return nil, placement.Plan{}, reconcile.ErrSettled // it is back
		}
		plan, err := p.replaceAsWide(p.topic.Spec, nil)
		if errors.As(err, new(*placement.Infeasible)) && c.forced(p.topic) {
			plan, err = p.overcommitted(p.topic.Spec)
		}
		return p.topic.Spec, plan, err
	})
	op.end = func(err error) {
		c.mu.Lock()
		c.mu.topics.at(name).stays = err
		c.mu.Unlock()
		if errors.As(err, new(*placement.Infeasible)) {
			c.cfg.Log.Warn("topic stays on a broker that drains or is gone", obs.KeyTopic, name, obs.KeyError, err)
		}
	}
	return op
}

// forced reports whether a broker of the topic is drained by force.
func (c *Controller) forced(topic catalog.Topic) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.ContainsFunc(topic.Plan.Quotas, func(q placement.Quota) bool {
		b, _ := c.mu.next.Broker(q.Broker)
		return b.Forced
	})
}

// settle gives a place to publishers that a fit has left without one: at its end,
// when something came between, or because another controller led. They go where
// their rates fit, on the brokers that carry the topic if they can: better late
// than silent for ever.
func (c *Controller) settle(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.mu.wanting {
		topic, _ := c.mu.cat.Topic(name)
		d := c.mu.topics.see(name).condition
		if !topic.Open() || d == nil || d.Stranded == 0 || topic.Placement.Unplaced() == 0 || c.mu.owned(name) || c.mu.tuner.Status(name, now).Running || now.Before(c.mu.topics.see(name).retry) {
			continue
		}
		c.mu.topics.at(name).retry = now.Add(moveRetry)
		why := cause{reason: srtmv1.MoveReason_MOVE_REASON_TAKE_OVER, why: "publishers have no place"}
		if c.mu.tuner.Status(name, now).Step != "" { // the fit was ours
			why.reason = srtmv1.MoveReason_MOVE_REASON_FIT
		}
		c.owners.want(moving(name, why, func(p planning) (*catalog.Spec, placement.Plan, error) {
			if p.topic.Placement.Unplaced() == 0 {
				return nil, placement.Plan{}, reconcile.ErrSettled
			}
			plan, err := p.replaceAsWide(p.topic.Spec, nil)
			return p.topic.Spec, plan, err
		}))
	}
}
