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

// Topic is a topic of the broker: its publications, contract, channels and subscriptions.
type Topic struct {
	// Set once.
	forget func(t *Topic, unneeded func() bool) bool // see Broker.forget

	runner
	intake
	terms
	orders

	// Guarded by mu.
	identity metadata.Identity // from the control plane; zero: unknown
	// memberships is the control plane's knowledge of durable channels, by name.
	memberships map[string]membership
	// endToEnd has the channels with recently finished messages.
	endToEnd map[*queue.Channel]*stats.Window

	// Owned by the caller of Broker.Report.
	reported reported
}

// SLO is the objective for the topic's delivery latency.
type SLO struct {
	Quantile float64       // in (0, 1); 0: no SLO
	Latency  time.Duration // delivery latency
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
			t.most = math.MaxInt // the disk takes large batches in several writes
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
		s := t.begin() // no other goroutine uses the topic yet
		t.agree(c, s)
		t.end(s)
	}
	return t
}

// deleteIfEphemeral deletes an ephemeral topic without channels and without a contract. The
// control plane or an operator expects the broker to keep a contract.
func (t *Topic) deleteIfEphemeral() {
	unneeded := func() bool { return len(t.mu.core.Channels()) == 0 && !t.mu.core.Contract().Limited() }
	if wire.Ephemeral(t.name) && t.forget(t, unneeded) {
		t.close(true)
		t.shared.changed()
	}
}

// Empty discards the messages that wait in the topic itself, like EmptyChannel.
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

// Unpause resumes releases. Error: ErrStorage.
func (t *Topic) Unpause() error {
	return t.ordered(func(m *metadata.Topic) bool {
		m.Paused = false
		return true
	}, func(now mono.Time, s *step) error {
		t.mu.core.Unpause(now, &s.fx)
		return nil
	})
}

// Retire sets whether the topic has moved to other brokers and accepts no messages here.
func (t *Topic) Retire(retired bool) {
	t.mu.Lock()
	t.mu.retired = retired
	t.room.Broadcast() // wakes waiting publishers
	t.mu.Unlock()
}

// Retired reports whether the topic is retired.
func (t *Topic) Retired() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.retired
}

// keep stores all messages of the topic, if it has a disk. The topic continues to work.
func (t *Topic) keep() {
	t.do(func(_ mono.Time, s *step) {
		if t.store != nil && !t.mu.closed {
			t.mu.core.Cursors().StoreAll(&s.fx)
		}
	})
}

// close ends the topic. It notifies subscriptions, and stops alarms and the store. Later
// steps of connections find nothing to release and no consumers. With remove, close
// discards the messages in memory and on disk, since silent connections may refer to a
// deleted topic for a long time. Without remove, the messages remain for persist.
func (t *Topic) close(remove bool) {
	// A publisher that is about to append must finish before or see the end. Otherwise it
	// would open a log that belongs to no topic, obstructs a later topic of this name, and
	// reappears at the next start.
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
		t.mu.core.Log().Discard(&s.fx)
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

// subscriptions returns the consumers, oldest first. Requires: mu held.
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
