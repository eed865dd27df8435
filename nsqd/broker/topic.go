package broker

import (
	"cmp"
	"errors"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/stats"
)

// Topic is a topic of the broker: what is published to it, its contract, its channels and
// their subscriptions.
type Topic struct {
	// Set once.
	forget func(t *Topic, unneeded func() bool) bool // see Broker.forget

	runner
	intake
	terms
	orders

	// Guarded by mu.
	identity metadata.Identity // of the topic, as the control plane says; zero: not known
	// memberships has what the control plane knows of the durable channels, by name.
	memberships map[string]membership
	// endToEnd has the channels of which something was finished lately.
	endToEnd map[*queue.Channel]*stats.Window

	// Owned by Broker.Report's one caller.
	reported reported
}

// SLO is what the topic's latencies are counted against.
type SLO struct {
	Quantile float64       // in (0, 1); 0: no SLO
	Latency  time.Duration // of delivery
}

func newTopic(b *shared, name string, forget func(*Topic, func() bool) bool, current func(*Topic) bool) *Topic {
	t := &Topic{forget: forget}
	r := &t.runner
	r.name, r.shared = name, b
	r.room.L = &r.mu
	r.coarse = newAlarm(&b.workers, b.now, newCoarseTimer, r.tick)
	r.sharp = newAlarm(&b.workers, b.now, newSharpTimer, r.tick)
	r.mu.consumers = make(map[queue.ConsumerID]*Subscription)
	c := queue.Config{
		Capacity:      b.cfg.Capacity,
		MaxInFlight:   b.cfg.MaxMsgTimeout,
		MaxBackdating: b.cfg.MaxBackdating,
		Begin:         b.now(),
		Rand:          rand.New(rand.NewPCG(b.cfg.Seed, hash(name))),
	}
	t.intake = intake{recorder: recorder{runner: r}, runner: r, most: b.cfg.Capacity}
	if st := b.cfg.Storage; st != nil && !wire.Ephemeral(name) {
		r.through = st.cfg.WriteThrough || st.cfg.Fsync
		c.Overflow, c.WriteThrough, c.MaxUnfinished = st.cfg.Overflow, r.through, st.cfg.MaxUnfinished
		c.First, c.ReadAhead = st.kept[name], st.readAhead()
		if c.Overflow > 0 {
			t.most = math.MaxInt // the disk takes it, in more than one write
		}
		t.store = newStore(r, func() bool { return current(t) }, func() { b.fenced(t) })
		if st.cfg.Replicated != nil {
			t.store.roster, t.store.restoreRoster = t.appendRoster, t.restoreRoster
		}
	}
	r.mu.core = queue.NewTopic(c)
	if t.store != nil {
		t.store.setRetention(nil)
	}
	t.pacing = pacing{all: b.cfg.Pacing, most: b.cfg.MaxWeight, core: r.mu.core, now: b.now}
	t.terms.runner = r
	t.reported.at = c.Begin // the first interval begins with the topic
	if c, ok := b.cfg.Presets[name]; ok {
		s := t.begin() // no other goroutine has it yet
		t.agree(c, s)
		t.end(s)
	}
	return t
}

// deleteIfEphemeral removes an ephemeral topic if nothing needs it: it has no channel, and no
// contract, which the control plane or an operator believes to be kept.
func (t *Topic) deleteIfEphemeral() {
	unneeded := func() bool { return len(t.mu.core.Channels()) == 0 && !t.mu.core.Limited() }
	if wire.Ephemeral(t.name) && t.forget(t, unneeded) {
		t.close(true)
		t.shared.changed()
	}
}

// Empty discards the messages that wait in the topic itself, as EmptyChannel does.
// Errors: ErrAway, ErrStorage.
func (t *Topic) Empty() (err error) {
	if t.isAway() {
		return ErrAway
	}
	if err := t.store.storable(); err != nil {
		return err
	}
	t.do(func(now mono.Time, s *step) {
		if t.awayLocked() {
			err = ErrAway
			return
		}
		t.mu.core.Empty(now, &s.fx)
	})
	return errors.Join(err, t.store.settled())
}

// Pause stops releases. Error: ErrStorage.
func (t *Topic) Pause() error {
	return t.ordered(func(m *metadata.Topic) bool {
		m.Paused = true
		return true
	}, func(mono.Time, *step) error {
		t.mu.core.Pause()
		return nil
	})
}

// Unpause resumes them. Error: ErrStorage.
func (t *Topic) Unpause() error {
	return t.ordered(func(m *metadata.Topic) bool {
		m.Paused = false
		return true
	}, func(now mono.Time, s *step) error {
		t.mu.core.Unpause(now, &s.fx)
		return nil
	})
}

// Retire says whether the topic has moved to other brokers, and takes no more messages here.
func (t *Topic) Retire(retired bool) {
	t.mu.Lock()
	t.mu.retired = retired
	t.room.Broadcast() // to those who wait to publish
	t.mu.Unlock()
}

// Retired reports whether the topic was retired.
func (t *Topic) Retired() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.retired
}

// keep has all that the topic holds stored, if it has a disk, while it goes on.
func (t *Topic) keep() {
	t.do(func(_ mono.Time, s *step) {
		if t.store != nil && !t.mu.closed {
			t.mu.core.Keep(&s.fx)
		}
	})
}

// close ends the topic: its subscriptions are told, its alarms and store
// stop, and whatever step a connection still takes finds nothing to release and
// none to deliver to. With remove its messages are let go, in memory and on
// disk, for connections may keep a deleted topic for as long as they are
// silent; without, they stay as they are, to be persisted.
func (t *Topic) close(remove bool) {
	// A publisher that is about to append must be through, or see the end: the
	// queue that it would open after that is no topic's, in the way of the topic's
	// next life, and comes back at the next start.
	t.storing.Lock()
	s := t.begin()
	now := t.shared.now()
	t.mu.closed = true
	t.capture = nil
	t.mu.core.Stop()
	if remove {
		for _, c := range slices.Clone(t.mu.core.Channels()) {
			t.removeChannel(now, c, s)
		}
		t.mu.core.Empty(now, &s.fx)
		t.mu.core.Discard(&s.fx)
	}
	for _, sub := range t.subscriptions() {
		t.detach(sub)
		s.woken = append(s.woken, sub)
	}
	if t.store != nil {
		t.store.endLocked(remove)
	}
	t.room.Broadcast()
	t.storing.Unlock()
	t.end(s)
	t.coarse.close()
	t.sharp.close()
}

// subscriptions returns the consumers by age. Requires: mu held.
func (t *Topic) subscriptions() []*Subscription {
	subs := make([]*Subscription, 0, len(t.mu.consumers))
	for _, sub := range t.mu.consumers {
		subs = append(subs, sub)
	}
	slices.SortFunc(subs, func(a, b *Subscription) int { return cmp.Compare(a.id, b.id) })
	return subs
}

func hash(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return h.Sum64()
}
