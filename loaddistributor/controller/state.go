package controller

import (
	"sync"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/condition"
	"github.com/srtm-io/srtm/loaddistributor/learned"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// state is what the controller knows. What is not set once is guarded by its lock, which its
// methods require to be held, for reading at least by those that change nothing.
type state struct {
	sync.RWMutex
	cfg *Config // set once
	pipeline
	brokers
	followed
	channels

	topics   topics
	wanting  []string // those that a tick has something to do for, sorted, by the last round of judge
	lacking  []string // those with live.reserved
	profiles int      // being made, those of topics that are gone included
	tuner    *tuner.Tuner
	work     sync.WaitGroup // what goes on; begins with the lock held, while not closing
	closing  bool
	ending   chan struct{}   // closed with closing
	late     <-chan struct{} // set once; closed when changes do not wait for answers any more
	empty    bool            // the catalog was at the start, and no topic was created since
	settled  time.Time       // of an empty one: until when it denies nothing; zero: no broker has joined
}

// brokers are what is known of those beside the catalog, by id.
type brokers struct {
	sessions map[string]*Session
	holders  map[string]*holder   // whom the ids belong to
	requests uint64               // the last number given to a request
	left     map[string]bool      // that had a session here and have none
	away     map[string]time.Time // that are, since when seen
	drainers map[string]string    // who had them drained; of before this one led that is unknown
	removing map[string]bool      // that RemoveBroker is about
}

// live is what this process knows of a topic beside the catalog. Guarded by
// state's lock.
type live struct {
	owner     *owner                // who changes it now; nil: none
	creating  *creation             // nil: it is not being created
	watchers  map[*watcher]struct{} // of its publishers
	condition *condition.Topic      // of one that is active
	retry     time.Time             // it is not to be moved by itself before
	stays     error                 // why it could not leave a broker
	turns     *string               // with scarce tokens: whose turn the adaptor was told it is (contracts.go)
	reserved  string                // what shares it lacks because of brokers that are gone
	unsynced  bool                  // the adaptor may have the shares of a move that was undone
	reminders []reminder            // publishers that brokers are to be told to disconnect
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

// at returns what is known of a topic, to be changed. Requires: the lock held.
func (t topics) at(name string) *live {
	if t[name] == nil {
		t[name] = &live{}
	}
	return t[name]
}

// see returns a copy of it. Requires: the lock held, for reading.
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

// What is done with the lock held in one go: so many topics are looked at, or so many
// times more that are quiet.
const (
	judgeAtOnce   = 100
	quietPerBusy  = 20
	workOfOneTurn = judgeAtOnce * quietPerBusy
)

// inTurns calls f with the name of every topic, sorted, and with the lock held for so much of
// f's work at a time: topics may come and go meanwhile. Requires: the lock is not held.
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
