package controller

import (
	"time"

	"github.com/srtm-io/srtm/loaddistributor/condition"
	"github.com/srtm-io/srtm/loaddistributor/learned"
)

// live is what this process knows of a topic beside the catalog. Guarded by
// Controller.mu.
type live struct {
	owner     *owner                // who changes it now; nil: none
	creating  *creation             // nil: it is not being created
	watchers  map[*watcher]struct{} // of its publishers
	condition *condition.Topic      // of one that is active
	retry     time.Time             // it is not to be moved by itself before
	stays     error                 // why it could not leave a broker
	turns     *string               // with scarce tokens: whose turn the adaptor was told it is (turn.go)
	reserved  string                // what shares it lacks because of brokers that are gone
	unsynced  bool                  // the adaptor may have the shares of a move that was undone
	reminders []reminder            // publishers that brokers are to be told to let go
	record    entrusted             // what brokers keep of it
	waiting   string                // why it is not rebuilt yet
	learns    bool                  // of one that is open
	learned   *learned.Topic        // of one that is open, or profiled
	learnedOf uint64                // when that was created
	profile   *profile              // nil: it is not being made
	moves     moves                 // of its publishers
	taking    map[string]taking     // of a replicated one, by the broker that is gone
}

// topics are those that something is known of, by name.
type topics map[string]*live

// at returns what is known of a topic, to be changed. Requires: Controller.mu held.
func (t topics) at(name string) *live {
	if t[name] == nil {
		t[name] = &live{}
	}
	return t[name]
}

// see returns a copy of it. Requires: Controller.mu held, for reading.
func (t topics) see(name string) live {
	if l := t[name]; l != nil {
		return *l
	}
	return live{}
}

// wants reports whether a tick has something to do for a topic.
func (l *live) wants() bool {
	return l.learns || l.learned != nil || l.profile != nil || len(l.reminders) > 0 || !l.retry.IsZero() ||
		l.condition != nil && (l.condition.IsMissed() || l.condition.Stranded > 0)
}

// idle reports whether nothing is under way of a topic that the catalog does not have.
func (l *live) idle() bool {
	return l.owner == nil && l.creating == nil && len(l.watchers) == 0 && l.waiting == ""
}

// owned reports whether an owner changes the topic now.
func (st *state) owned(name string) bool { return st.topics.see(name).owner != nil }
