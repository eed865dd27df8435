package controller

import (
	"maps"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/condition"
	"github.com/srtm-io/srtm/loaddistributor/reports"
)

// judge updates the verdict of every active topic over its window.
func (c *Controller) judge(now time.Time) {
	c.mu.Lock()
	forgotten := func(id string) bool { _, known := c.mu.cat.Broker(id); return !known }
	maps.DeleteFunc(c.mu.left, func(id string, _ bool) bool { return forgotten(id) })
	maps.DeleteFunc(c.mu.away, func(id string, _ time.Time) bool { return forgotten(id) })
	maps.DeleteFunc(c.mu.drainers, func(id string, _ string) bool { return forgotten(id) })
	if len(c.mu.topics) > c.mu.cat.Len() { // else few entries are missing from the catalog
		for name, l := range c.mu.topics {
			if _, known := c.mu.cat.Active(name); !known && l.idle() {
				delete(c.mu.topics, name)
			}
		}
	}
	c.mu.Unlock()
	var changes []catalog.StateChanged
	var wanting []string
	c.mu.inTurns(c.mu, func(name string) (work int) {
		work, changed := c.mu.judge(name, now)
		changes = append(changes, changed...)
		if l := c.mu.topics[name]; l != nil && l.wants() {
			wanting = append(wanting, name)
		}
		return work
	})
	logChanges(c.cfg.Log, changes)
	c.mu.Lock()
	c.mu.wanting = wanting
	c.mu.Unlock()
}

// judge updates the verdict of a topic, and returns the amount of work.
func (st *state) judge(name string, now time.Time) (work int, changes []catalog.StateChanged) {
	l := st.topics[name]
	if active, _ := st.cat.Active(name); !active {
		if l != nil {
			l.condition = nil
		}
		return 1, nil
	}
	if l != nil && l.condition != nil && l.condition.Quiet && l.reserved == "" && len(st.left)+len(st.away) == 0 {
		l.condition.Passed(now)
		return 1, nil
	}
	topic, _ := st.cat.Topic(name)
	l = st.topics.at(name)
	if l.learns = topic.Spec.Demand.Open; l.condition == nil {
		l.condition = condition.New()
	}
	return quietPerBusy, l.condition.Look(topic, st.evidence(name, now), now)
}

// evidence returns the inputs for judging a topic. They are valid while the lock is held.
func (st *state) evidence(name string, now time.Time) condition.Evidence {
	return condition.Evidence{
		Reported: func(broker string) *reports.Topic { return st.reported(broker).Topic(name) },
		Gone:     func(broker string) bool { return st.gone(broker, now) },
		Window:   st.cfg.Window, Reserved: st.topics.see(name).reserved,
	}
}

// wakeTopic makes the next round of judge look at a quiet topic.
func (st *state) wakeTopic(name string) {
	if l := st.topics[name]; l != nil && l.condition != nil {
		l.condition.Quiet = false
	}
}

// gone reports whether a broker is known to be disconnected: its session in this process
// has ended, or it has not joined this process for EvacuateAfter. All brokers must rejoin
// a controller that has just started.
func (st *state) gone(id string, now time.Time) bool {
	b, _ := st.cat.Broker(id)
	since, away := st.away[id]
	return !b.Connected && (st.left[id] || away && now.Sub(since) >= st.cfg.EvacuateAfter)
}
