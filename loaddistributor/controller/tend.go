package controller

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
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
	if err := c.following(); err != nil {
		return catalog.Broker{}, err
	}
	if err := c.commit(e); err != nil {
		return catalog.Broker{}, err
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	b, _ := c.mu.cat.Broker(id)
	return b, nil
}

// BrokerTopics returns the topics that are placed on the broker or have left
// messages there, by name.
func (c *Controller) BrokerTopics(id string) []string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.mu.cat.Placed(id)
}

// tend moves topics away from brokers that drain or have been away for too
// long, and retires those that have been emptied.
func (c *Controller) tend(now time.Time) {
	type task struct {
		topic string
		do    func()
	}
	var tasks []task
	c.mu.Lock()
	for _, b := range c.mu.cat.Brokers() {
		leave := b.Draining
		switch since, away := c.mu.away[b.ID]; {
		case b.Connected:
			delete(c.mu.away, b.ID)
		case !away:
			c.mu.away[b.ID] = now
		default:
			leave = leave || now.Sub(since) >= c.cfg.EvacuateAfter
		}
		for _, name := range c.mu.cat.Placed(b.ID) {
			topic, _ := c.mu.cat.Topic(name)
			switch {
			case !open(topic) || c.mu.names[name] != nil:
			case slices.Contains(topic.Retiring, b.ID):
				switch {
				case c.emptyLocked(topic, b.ID, now):
					tasks = append(tasks, task{name, func() { c.retire(name, b.ID, true) }})
				case c.untakenLocked(topic, b, now):
					tasks = append(tasks, task{name, func() { c.retire(name, b.ID, false) }})
				default:
					c.lingerLocked(topic, b.ID, now)
					if c.turnsLocked(topic) {
						tasks = append(tasks, task{name, func() { c.turn(name) }})
					}
				}
			case leave && !now.Before(c.mu.retry[name]):
				c.mu.retry[name] = now.Add(moveRetry)
				tasks = append(tasks, task{name, func() { c.leave(name) }})
			}
		}
	}
	for name, at := range c.mu.retry {
		if now.After(at) {
			delete(c.mu.retry, name)
		}
	}
	for name := range c.mu.stays {
		if _, again := c.mu.retry[name]; !again {
			delete(c.mu.stays, name) // it need not leave any more
		}
	}
	for name := range c.mu.turns {
		if _, ok := c.mu.cat.Topic(name); !ok {
			delete(c.mu.turns, name)
		}
	}
	for name := range c.mu.untold {
		if _, ok := c.mu.cat.Topic(name); !ok {
			delete(c.mu.untold, name)
		}
	}
	if c.mu.closing {
		tasks = nil
	}
	for _, t := range tasks {
		if c.mu.names[t.topic] != nil {
			continue // two brokers of one topic: one after the other
		}
		release := c.holdLocked(t.topic)
		c.work.Add(1)
		go func() {
			defer c.work.Done()
			defer release()
			t.do()
		}()
	}
	c.mu.Unlock()
}

// emptyLocked reports whether a broker that the topic moved away from has
// nothing of it, by a report of after the move. Requires: mu held.
func (c *Controller) emptyLocked(topic catalog.Topic, id string, now time.Time) bool {
	s := c.mu.sessions[id]
	if s == nil || s.reports < 2 {
		return false
	}
	f := s.topics[topic.Spec.Name()]
	if f == nil {
		return true // it lists all it has
	}
	if len(f.reports) == 0 {
		return false
	}
	last := f.reports[len(f.reports)-1]
	r := last.stats
	// An interval without anything, so that what was on its way when the
	// connections ended has been counted.
	return r.Backlog == 0 && r.Depth == 0 && r.Publishers == 0 && r.Offered == 0 && r.Delivered == 0 &&
		now.Sub(last.at) <= c.cfg.Window
}

// retire has an emptied broker remove the topic, unless something has come since
// its report, over HTTP say: then it stays, to be asked again; not unused, whatever
// it holds. Requires: the name is held.
func (c *Controller) retire(name, id string, unused bool) {
	var left uint64
	c.mu.Lock()
	c.mu.retires[id]++
	if f := c.figuresLocked(name, id); f != nil {
		last := f.reports[len(f.reports)-1].stats
		left = last.Depth + last.Backlog
	}
	c.mu.Unlock()
	if !unused {
		c.cfg.Log.Warn("messages that no consumer takes are lost with a drain by force", obs.KeyTopic, name, obs.KeyBroker, id, obs.KeyCount, left)
	}
	defer func() {
		c.mu.Lock()
		if c.mu.retires[id]--; c.mu.retires[id] == 0 {
			delete(c.mu.retires, id)
		}
		c.mu.Unlock()
	}()
	if err := c.remove(name, unused, id)[id]; err != nil {
		c.cfg.Log.Info("topic stays on a broker that it has moved away from", obs.KeyTopic, name, obs.KeyBroker, id, obs.KeyError, err)
		return
	}
	// After a crash here the broker does not list the topic any more, which is
	// as good as a report of nothing.
	err := must("retire "+id, c.commit(catalog.MemberRetired{Topic: name, Broker: id}))
	if err != nil {
		return // the next controller does it
	}
	if err := c.reshare(name); err != nil {
		c.cfg.Log.Warn("shares as before a broker retired, for now", obs.KeyTopic, name, obs.KeyBroker, id, obs.KeyError, err)
	}
	c.cfg.Log.Info("topic gone from broker", obs.KeyTopic, name, obs.KeyBroker, id)
}

// remove has brokers remove a topic, unused: if they do not use it, within
// PrepareTimeout, and returns why any of them is not known to have done so.
func (c *Controller) remove(name string, unused bool, ids ...string) map[string]error {
	answers := make(map[string]chan error, len(ids))
	now := c.now()
	c.mu.Lock()
	for _, id := range ids {
		done := make(chan error, 1)
		answers[id] = done
		if s := c.mu.sessions[id]; s != nil {
			c.removeLocked(s, name, unused, done, now)
		} else {
			done <- ErrBrokerGone
		}
	}
	c.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(context.Background(), c.cfg.PrepareTimeout, ErrNoAnswer)
	defer cancel()
	failed := map[string]error{}
	for _, id := range ids {
		var err error
		select {
		case err = <-answers[id]:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		if err != nil {
			failed[id] = err
		}
	}
	return failed
}

// leave moves a topic to where it may be. Requires: the name is held.
func (c *Controller) leave(name string) {
	err := c.move(name, "a broker drains or is gone", func(topic catalog.Topic, brokers []placement.Broker) (*catalog.Spec, placement.Plan, error) {
		if !slices.ContainsFunc(topic.Plan.Quotas, func(q placement.Quota) bool {
			return !slices.ContainsFunc(brokers, func(b placement.Broker) bool { return b.ID == q.Broker })
		}) {
			return nil, placement.Plan{}, errSettled // it is back
		}
		plan, err := c.replaceAsWide(topic, brokers)
		if errors.As(err, new(*placement.Infeasible)) && c.forced(topic) {
			plan, err = overcommitted(brokers, func(more []placement.Broker) (placement.Plan, error) { return c.replaceAsWide(topic, more) })
		}
		return topic.Spec, plan, err
	})
	c.mu.Lock()
	if c.mu.stays[name] = err; err == nil {
		delete(c.mu.stays, name)
	}
	c.mu.Unlock()
	if errors.As(err, new(*placement.Infeasible)) {
		c.cfg.Log.Warn("topic stays on a broker that drains or is gone", obs.KeyTopic, name, obs.KeyError, err)
	}
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
