package controller

import (
	"time"

	"github.com/srtm-io/srtm/loaddistributor/condition"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
)

// topics holds this process's data about topics beside the catalog. The controller's lock
// guards topics, and the caller of a method holds the lock.
type topics struct {
	byName map[string]*liveTopic
	busy   []string // topics that need a tick, sorted, from the last round of the judge
}

// liveTopic holds this process's data about a topic beside the catalog. Guarded by the
// controller's lock.
type liveTopic struct {
	owner     *owner                // changes the topic now; nil: none
	creating  *creation             // nil: not being created
	watchers  map[*watcher]struct{} // of its publishers
	condition *condition.Topic      // of an active topic
	retry     time.Time             // no automatic move before
	moveErr   error                 // why the topic could not leave a broker
	sentTurn  *string               // with scarce tokens: the turn last sent to the adaptor
	reserved  string                // which shares are reserved for brokers that are gone
	unsynced  bool                  // the adaptor may have the shares of an aborted move
	reminders []reminder            // publishers that brokers must disconnect
	late      *reconcile.Latecomers // consumers that new brokers lack; nil: none
	record    entrusted             // the copy that brokers keep of the topic
	waiting   string                // why the topic is not rebuilt yet
	learning  bool                  // the topic is open
	learned   *learned.Topic        // of an open or profiled topic
	learnedOf uint64                // Created of the topic that learned belongs to
	profile   *profile              // nil: not being profiled
	moves     moveHistory           // recent moves of the topic's publishers
	takeOvers map[string]takeOver   // of a replicated topic, by the broker that is gone
}

// entry returns the entry of a topic for changes, and creates the entry if it is missing.
func (t *topics) entry(name string) *liveTopic {
	if t.byName[name] == nil {
		t.byName[name] = &liveTopic{}
	}
	return t.byName[name]
}

// peek returns a copy of the entry. Requires: the lock held, for reading.
func (t *topics) peek(name string) liveTopic {
	if l := t.byName[name]; l != nil {
		return *l
	}
	return liveTopic{}
}

// owned reports whether an owner is changing the topic.
func (t *topics) owned(name string) bool { return t.peek(name).owner != nil }

// needsTick reports whether a topic needs a tick.
func (l *liveTopic) needsTick() bool {
	return l.learning || l.learned != nil || l.profile != nil || len(l.reminders) > 0 || l.late != nil || !l.retry.IsZero() ||
		l.condition != nil && (l.condition.IsMissed() || l.condition.Stranded > 0)
}

// idle reports whether a topic that is not in the catalog has no activity.
func (l *liveTopic) idle() bool {
	return l.owner == nil && l.creating == nil && len(l.watchers) == 0 && l.waiting == ""
}
