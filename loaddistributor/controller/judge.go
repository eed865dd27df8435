package controller

import (
	"maps"
	"sync"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/condition"
	"github.com/srtm-io/srtm/loaddistributor/reports"
)

// judge keeps the verdicts about active topics.
type judge struct {
	// Set once.
	cfg     *Config
	mu      *sync.RWMutex
	cat     *pipeline
	brokers *brokers
	topics  *topics
}

// run updates the verdict of every active topic over its window.
func (j *judge) run(now time.Time) {
	j.mu.Lock()
	forgotten := func(id string) bool { _, found := j.cat.committed.Broker(id); return !found }
	maps.DeleteFunc(j.brokers.sessionEnded, func(id string, _ bool) bool { return forgotten(id) })
	maps.DeleteFunc(j.brokers.disconnectedSince, func(id string, _ time.Time) bool { return forgotten(id) })
	maps.DeleteFunc(j.brokers.drainers, func(id string, _ string) bool { return forgotten(id) })
	if len(j.topics.byName) > j.cat.committed.Len() { // else few entries are missing from the catalog
		for name, l := range j.topics.byName {
			if _, found := j.cat.committed.Active(name); !found && l.idle() {
				delete(j.topics.byName, name)
			}
		}
	}
	j.mu.Unlock()
	var changes []catalog.StateChanged
	var wanting []string
	j.cat.inTurns(j.mu, func(name string) (work int) {
		work, changed := j.judge(name, now)
		changes = append(changes, changed...)
		if l := j.topics.byName[name]; l != nil && l.needsTick() {
			wanting = append(wanting, name)
		}
		return work
	})
	logChanges(j.cfg.Log, changes)
	j.mu.Lock()
	j.topics.busy = wanting
	j.mu.Unlock()
}

// judge updates the verdict of a topic, and returns the amount of work.
func (j *judge) judge(name string, now time.Time) (work int, changes []catalog.StateChanged) {
	l := j.topics.byName[name]
	if active, _ := j.cat.committed.Active(name); !active {
		if l != nil {
			l.condition = nil
		}
		return 1, nil
	}
	if l != nil && l.condition != nil && l.condition.Quiet && l.reserved == "" && len(j.brokers.sessionEnded)+len(j.brokers.disconnectedSince) == 0 {
		l.condition.Passed(now)
		return 1, nil
	}
	topic, _ := j.cat.committed.Topic(name)
	l = j.topics.entry(name)
	if l.learning = topic.Spec.Demand.Open; l.condition == nil {
		l.condition = condition.New()
	}
	return quietPerBusy, l.condition.Judge(topic, j.evidence(name, now), now)
}

// evidence returns the inputs for judging a topic. They are valid while the lock is held.
func (j *judge) evidence(name string, now time.Time) condition.Evidence {
	return condition.Evidence{
		Reported:     func(broker string) *reports.Topic { return j.brokers.reported(broker).Topic(name) },
		Disconnected: func(broker string) bool { return j.disconnected(broker, now) },
		Window:       j.cfg.Window, Reserved: j.topics.peek(name).reserved,
	}
}

// wakeTopic makes the next round of judge look at a quiet topic.
func (t *topics) wake(name string) {
	if l := t.byName[name]; l != nil && l.condition != nil {
		l.condition.Quiet = false
	}
}

// disconnected reports whether a broker is known to be disconnected: its session in this process
// has ended, or it has not joined this process for EvacuateAfter. All brokers must rejoin
// a controller that has just started.
func (j *judge) disconnected(id string, now time.Time) bool {
	b, _ := j.cat.committed.Broker(id)
	since, found := j.brokers.disconnectedSince[id]
	return !b.Connected && (j.brokers.sessionEnded[id] || found && now.Sub(since) >= j.cfg.EvacuateAfter)
}
