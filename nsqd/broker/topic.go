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
	"github.com/srtm-io/srtm/tokenbucket"
)

// Topic is a topic of the broker: its publications, contract, channels and subscriptions.
type Topic struct {
	// Set once.
	forget func(t *Topic, unneeded func() bool) bool // see Broker.forget

	runner   runner
	store    *store // nil if the topic has no disk
	orders   orders
	expiry   expiries
	channels channelSet
	intake   intake
	terms    terms

	// Owned by the caller of Broker.Report.
	reported reported
}

// Name returns the topic's name.
func (t *Topic) Name() string { return t.runner.name }

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
		HoldFrom:      func() mono.Time { return mono.Time(b.holdFrom.Load()) },
		Rand:          rand.New(rand.NewPCG(b.cfg.Seed, hash(name))),
	}
	most := b.cfg.Capacity // per batch
	if st := b.cfg.Storage; st != nil && !wire.Ephemeral(name) {
		r.writeThrough = st.cfg.WriteThrough || st.cfg.Fsync
		c.Overflow, c.WriteThrough, c.MaxUnfinished = st.cfg.Overflow, r.writeThrough, st.cfg.MaxUnfinished
		c.First, c.ReadAhead = st.nextOffsets[name], st.readAhead()
		if c.Overflow > 0 {
			most = math.MaxInt // the disk takes large batches in several writes
		}
		t.store = newStore(r, func() bool { return current(t) }, func() { b.fenced(t) })
		if st.cfg.Replicated != nil {
			t.store.roster, t.store.restoreRoster = t.channels.appendRoster, t.channels.restoreRoster
		}
	}
	r.mu.core = queue.NewTopic(c)
	t.orders.runner = r
	t.expiry = expiries{runner: r, orders: &t.orders}
	t.channels.runner, t.channels.orders, t.channels.expiry, t.channels.store = r, &t.orders, &t.expiry, t.store
	t.intake = intake{
		runner: r, store: t.store, most: most, recorder: recorder{runner: r},
		pacing: pacing{all: b.cfg.Pacing, most: uint8(b.cfg.MaxWeight), core: r.mu.core, now: b.now},
	}
	t.terms.runner = r
	if t.store != nil {
		t.store.setRetention(nil)
	}
	t.reported.at = c.Begin // the first interval begins with the topic
	if c, ok := b.cfg.Presets[name]; ok {
		s := t.runner.begin() // no other goroutine uses the topic yet
		t.terms.agree(c, s)
		t.runner.end(s)
	}
	return t
}

// deleteIfEphemeral deletes an ephemeral topic without channels and without a contract. The
// control plane or an operator expects the broker to keep a contract.
func (t *Topic) deleteIfEphemeral() {
	unneeded := func() bool { return len(t.runner.mu.core.Channels()) == 0 && !t.runner.mu.core.Contract().Limited() }
	if wire.Ephemeral(t.runner.name) && t.forget(t, unneeded) {
		t.close(true)
		t.runner.shared.changed(t.runner.name)
	}
}

// Empty discards the messages that wait in the topic itself, like EmptyChannel.
// Errors: ErrUnavailable, ErrStorage.
func (t *Topic) Empty() (err error) {
	if t.runner.isUnavailable() {
		return ErrUnavailable
	}
	if err := t.store.storable(); err != nil {
		return err
	}
	t.runner.do(func(now mono.Time, s *step) {
		if t.runner.unavailableLocked() {
			err = ErrUnavailable
			return
		}
		t.runner.mu.core.Empty(now, &s.fx)
	})
	return errors.Join(err, t.store.settled())
}

// Pause stops releases. Error: ErrStorage.
func (t *Topic) Pause() error {
	return t.orders.ordered(func(m *metadata.Topic) bool {
		m.Paused = true
		return true
	}, func(mono.Time, *step) error {
		t.runner.mu.core.Pause()
		return nil
	})
}

// Unpause resumes releases. Error: ErrStorage.
func (t *Topic) Unpause() error {
	return t.orders.ordered(func(m *metadata.Topic) bool {
		m.Paused = false
		return true
	}, func(now mono.Time, s *step) error {
		t.runner.mu.core.Unpause(now, &s.fx)
		return nil
	})
}

// Retire sets whether the topic has moved to other brokers and accepts no messages here.
func (t *Topic) Retire(retired bool) {
	t.runner.mu.Lock()
	t.runner.mu.retired, t.runner.mu.uncreated = retired, false
	t.runner.room.Broadcast() // wakes waiting publishers
	t.runner.mu.Unlock()
}

// Uncreated reports whether the topic holds only messages from before its creation failed. For clients
// such a topic does not exist.
func (t *Topic) Uncreated() bool {
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	return t.runner.mu.uncreated
}

// Retired reports whether the topic is retired.
func (t *Topic) Retired() bool {
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	return t.runner.mu.retired
}

// storeAll stores all messages of the topic, if it has a disk. The topic continues to work.
func (t *Topic) storeAll() {
	t.runner.do(func(_ mono.Time, s *step) {
		if t.store != nil && !t.runner.mu.closed {
			t.runner.mu.core.Cursors().StoreAll(&s.fx)
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
	t.runner.storing.Lock()
	s := t.runner.begin()
	now := t.runner.shared.now()
	t.runner.mu.closed = true
	t.intake.recorder.capture = nil
	t.runner.mu.core.Stop()
	if remove {
		for _, c := range slices.Clone(t.runner.mu.core.Channels()) {
			t.channels.removeChannel(now, c, s)
		}
		t.runner.mu.core.Empty(now, &s.fx)
		t.runner.mu.core.Log().Discard(&s.fx)
	}
	for _, sub := range t.subscriptions() {
		t.channels.detach(sub)
		s.woken = append(s.woken, sub)
	}
	if t.store != nil {
		t.store.endLocked(remove)
	}
	t.runner.room.Broadcast()
	t.runner.storing.Unlock()
	t.runner.end(s)
	t.runner.coarse.close()
	t.runner.sharp.close()
}

// subscriptions returns the consumers, oldest first. Requires: mu held.
func (t *Topic) subscriptions() []*Subscription {
	subs := make([]*Subscription, 0, len(t.runner.mu.consumers))
	for _, sub := range t.runner.mu.consumers {
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

// terms hold a topic's contract and SLO.
type terms struct {
	runner *runner // set once

	// Guarded by mu.
	slo      SLO
	contract *metadata.Contract // recorded contract; replaced, never modified. Nil: no contract, or a preset
}

// Limit puts the topic under a contract without a share: the topic accepts messages, but
// releases none until it has a share. A topic that is already limited keeps its share.
func (t *terms) Limit(slo SLO, reject bool) {
	t.runner.do(func(mono.Time, *step) {
		t.slo = slo
		t.runner.metrics.slo.Store(int64(slo.Latency))
		t.runner.mu.core.Limit(t.overLimit(reject))
	})
}

func (t *terms) overLimit(reject bool) queue.OverLimit {
	return queue.OverLimit{Reject: reject, MaxDelay: t.runner.shared.cfg.RejectAfter}
}

// SetLeased replaces the share for the term of the lease, adds the granted tokens, and
// returns the tokens given up. The topic is limited from then on.
func (t *terms) SetLeased(share tokenbucket.Share, lease queue.Lease, granted tokenbucket.Tokens) (released tokenbucket.Tokens) {
	t.runner.do(func(now mono.Time, s *step) {
		if !t.runner.mu.core.Contract().Limited() {
			t.runner.mu.core.Limit(t.overLimit(false))
		}
		released = t.runner.mu.core.SetLeased(now, share, lease, granted, &s.fx)
	})
	return released
}

// Renew extends the share's lease, and reports whether the lease has a flexible part that
// has not expired.
func (t *terms) Renew(flexUntil, until mono.Time) (flex bool) {
	t.runner.do(func(now mono.Time, s *step) {
		flex = t.runner.mu.core.Contract().Limited() && t.runner.mu.core.Renew(now, flexUntil, until, &s.fx)
	})
	return flex
}

// Contract puts the topic of a standalone broker under a contract. A topic that is already
// limited keeps its tokens, as far as they fit. Otherwise the bucket is initially empty:
// the topic may already have released a full bucket under the same contract, before a
// deletion or a restart. The contract survives a restart, but Config.Presets have priority.
// Error: ErrStorage.
func (t *Topic) Contract(c tokenbucket.Share, reject bool) error {
	contract := &metadata.Contract{RateMilli: int64(c.Rate), Burst: c.Burst, Reject: reject}
	return t.orders.ordered(func(m *metadata.Topic) bool {
		m.Contract = contract
		return true
	}, func(_ mono.Time, s *step) error {
		t.terms.contract = contract
		t.terms.agree(*contract, s)
		return nil
	})
}

// RemoveContract removes the contract and releases the messages that wait for tokens. After
// a restart there is no contract, except from Config.Presets. Error: ErrStorage.
func (t *Topic) RemoveContract() error {
	return t.orders.ordered(func(m *metadata.Topic) bool {
		m.Contract = nil
		return true
	}, func(now mono.Time, s *step) error {
		t.terms.contract = nil
		t.runner.mu.core.Unlimit(now, &s.fx)
		return nil
	})
}

// agree puts the topic under c. Requires: mu held.
func (t *terms) agree(c metadata.Contract, s *step) {
	t.runner.mu.core.Limit(t.overLimit(c.Reject))
	t.runner.mu.core.SetShare(t.runner.shared.now(), c.Share(), 0, &s.fx)
}

// restoreContract restores the recorded contract, unless the topic has a preset contract.
func (t *terms) restoreContract(c *metadata.Contract) {
	t.runner.do(func(_ mono.Time, s *step) {
		if !t.runner.mu.core.Contract().Limited() {
			t.contract = c
			t.agree(*c, s)
		}
	})
}
