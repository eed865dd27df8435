package controller

import (
	"sync"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/condition"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// state is the controller's data. The lock guards all fields that are not set once.
// Methods require the lock; methods that only read require it for reading.
type state struct {
	sync.RWMutex
	cfg *Config // set once
	pipeline
	brokers
	followed
	channels

	topics   topics
	wanting  []string // topics that need a tick, sorted, from the last round of judge
	lacking  []string // topics with live.reserved
	profiles int      // profiles in progress, including profiles of deleted topics
	tuner    *tuner.Tuner
	work     sync.WaitGroup // all goroutines; Add requires the lock and not closing
	closing  bool
	ending   chan struct{}   // closed with closing
	late     <-chan struct{} // set once; closed when changes stop waiting for answers
	empty    bool            // the catalog was empty at the start, and no topic was created since
	settled  time.Time       // if empty: until then no topic is denied; zero: no broker has joined
}

// brokers holds data about brokers beside the catalog, by id.
type brokers struct {
	sessions map[string]*Session
	holders  map[string]*holder   // processes that own the ids
	requests uint64               // number of the last request
	left     map[string]bool      // brokers whose session here has ended
	away     map[string]time.Time // disconnected brokers, since when
	drainers map[string]string    // who requested the drain; unknown before this process led
	removing map[string]bool      // brokers that RemoveBroker is removing
}

// live holds this process's data about a topic beside the catalog. Guarded by state's
// lock.
type live struct {
	owner     *owner                // changes the topic now; nil: none
	creating  *creation             // nil: not being created
	watchers  map[*watcher]struct{} // of its publishers
	condition *condition.Topic      // of an active topic
	retry     time.Time             // no automatic move before
	stays     error                 // why the topic could not leave a broker
	turns     *string               // with scarce tokens: the turn last sent to the adaptor (contracts.go)
	reserved  string                // which shares are reserved for brokers that are gone
	unsynced  bool                  // the adaptor may have the shares of an aborted move
	reminders []reminder            // publishers that brokers must disconnect
	record    entrusted             // the copy that brokers keep of the topic
	waiting   string                // why the topic is not rebuilt yet
	learns    bool                  // the topic is open
	learned   *learned.Topic        // of an open or profiled topic
	learnedOf uint64                // Created of the topic that learned belongs to
	profile   *profile              // nil: not being profiled
	moves     moves                 // recent moves of the topic's publishers
	taking    map[string]taking     // of a replicated topic, by the broker that is gone
}

// topics holds the live data, by topic name.
type topics map[string]*live

// at returns the entry of a topic for changes, and creates it if missing. Requires: the
// lock held.
func (t topics) at(name string) *live {
	if t[name] == nil {
		t[name] = &live{}
	}
	return t[name]
}

// see returns a copy of the entry. Requires: the lock held, for reading.
func (t topics) see(name string) live {
	if l := t[name]; l != nil {
		return *l
	}
	return live{}
}

// wants reports whether a topic needs a tick.
func (l *live) wants() bool {
	return l.learns || l.learned != nil || l.profile != nil || len(l.reminders) > 0 || !l.retry.IsZero() ||
		l.condition != nil && (l.condition.IsMissed() || l.condition.Stranded > 0)
}

// idle reports whether a topic that is not in the catalog has no activity.
func (l *live) idle() bool {
	return l.owner == nil && l.creating == nil && len(l.watchers) == 0 && l.waiting == ""
}

// owned reports whether an owner is changing the topic.
func (st *state) owned(name string) bool { return st.topics.see(name).owner != nil }

// Work per acquisition of the lock: judgeAtOnce busy topics, or quietPerBusy times more
// quiet topics.
const (
	judgeAtOnce   = 100
	quietPerBusy  = 20
	workOfOneTurn = judgeAtOnce * quietPerBusy
)

// inTurns calls f with the name of every topic, sorted. It acquires the lock for
// workOfOneTurn of f's work at a time, so topics may be added or removed between turns.
// Requires: the lock is not held.
func (st *state) inTurns(lock sync.Locker, f func(name string) (work int)) {
	for after, more := "", true; more; {
		more = false
		lock.Lock()
		work := 0
		for name := range st.cat.Names(after) {
			if more = work >= workOfOneTurn; more {
				break
			}
			after, work = name, work+f(name)
		}
		lock.Unlock()
	}
}
