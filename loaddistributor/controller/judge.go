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

// look updates the verdict of every active topic over its window.
func (j *judge) look(now time.Time) {
	j.mu.Lock()
	forgotten := func(id string) bool { _, known := j.cat.shown.Broker(id); return !known }
	maps.DeleteFunc(j.brokers.left, func(id string, _ bool) bool { return forgotten(id) })
	maps.DeleteFunc(j.brokers.away, func(id string, _ time.Time) bool { return forgotten(id) })
	maps.DeleteFunc(j.brokers.drainers, func(id string, _ string) bool { return forgotten(id) })
	if len(j.topics.byName) > j.cat.shown.Len() { // else few entries are missing from the catalog
		for name, l := range j.topics.byName {
			if _, known := j.cat.shown.Active(name); !known && l.idle() {
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
		if l := j.topics.byName[name]; l != nil && l.wants() {
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
	if active, _ := j.cat.shown.Active(name); !active {
		if l != nil {
			l.condition = nil
		}
		return 1, nil
	}
	if l != nil && l.condition != nil && l.condition.Quiet && l.reserved == "" && len(j.brokers.left)+len(j.brokers.away) == 0 {
		l.condition.Passed(now)
		return 1, nil
	}
	topic, _ := j.cat.shown.Topic(name)
	l = j.topics.entry(name)
	if l.learns = topic.Spec.Demand.Open; l.condition == nil {
		l.condition = condition.New()
	}
	return quietPerBusy, l.condition.Judge(topic, j.evidence(name, now), now)
}

// evidence returns the inputs for judging a topic. They are valid while the lock is held.
func (j *judge) evidence(name string, now time.Time) condition.Evidence {
	return condition.Evidence{
		Reported:     func(broker string) *reports.Topic { return j.brokers.reported(broker).Topic(name) },
		Disconnected: func(broker string) bool { return j.gone(broker, now) },
		Window:       j.cfg.Window, Reserved: j.topics.peek(name).reserved,
	}
}

// wakeTopic makes the next round of judge look at a quiet topic.
func (t *topics) wake(name string) {
	if l := t.byName[name]; l != nil && l.condition != nil {
		l.condition.Quiet = false
	}
}

// gone reports whether a broker is known to be disconnected: its session in this process
// has ended, or it has not joined this process for EvacuateAfter. All brokers must rejoin
// a controller that has just started.
func (j *judge) gone(id string, now time.Time) bool {
	b, _ := j.cat.shown.Broker(id)
	since, away := j.brokers.away[id]
	return !b.Connected && (j.brokers.left[id] || away && now.Sub(since) >= j.cfg.EvacuateAfter)
}
