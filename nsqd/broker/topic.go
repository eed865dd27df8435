package broker

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/stats"
)

// Topic runs one queue.Topic: every step happens under mu, and what it causes
// (wake-ups, alarms) after mu is released.
type Topic struct {
	// Set once.
	name    string
	shared  *shared
	forget  func(*Topic) bool // takes it off the broker's table, if nothing needs it
	current func(*Topic) bool // whether it is there
	store   *store            // nil: it has no disk
	through bool              // everything published is stored first
	most    int               // messages that one batch may have

	// Timeouts and deferrals need milliseconds; releases need the microseconds
	// that a token takes. Only limited topics wait for a release, so only they
	// pay for the sharp alarm.
	coarse, sharp *alarm

	mu struct {
		sync.Mutex
		core      *queue.Topic
		consumers map[queue.ConsumerID]*Subscription
		slo       SLO
		contract  *metadata.Contract // to be restored; not changed, but replaced. Nil: none, or the preset one
		identity  metadata.Identity  // of the topic, as the control plane says; zero: not known
		closed    bool
		held      int64 // the topic's part of Broker.held
		// publishers is the number of open connections that have published here.
		publishers int
		capture    *capture // nil: none is wanted
		captures   uint64   // ever begun
		pacing     pacing
		// endToEnd has the channels of which something was finished lately.
		endToEnd map[*queue.Channel]*stats.Window
	}
	// room is told when the topic's backlog may have room again, or never will.
	room    sync.Cond // on mu
	metrics metrics
	// Owned by Broker.Report's one caller.
	reported reported

	// storing orders the publishers of a topic whose messages go through the
	// disk: the order there is the topic's order. Taken before mu.
	storing sync.Mutex
}

// SLO is what the topic's latencies are counted against.
type SLO struct {
	Quantile float64       // in (0, 1); 0: no SLO
	Latency  time.Duration // of delivery
}

func newTopic(b *shared, name string, forget, current func(*Topic) bool) *Topic {
	t := &Topic{name: name, shared: b, forget: forget, current: current}
	overflow, unfinished, ahead, first := 0, 0, 0, queue.Offset(0)
	if st := b.cfg.Storage; st != nil && !wire.Ephemeral(name) {
		overflow, unfinished, t.through = st.cfg.Overflow, st.cfg.MaxUnfinished, st.cfg.WriteThrough || st.cfg.Fsync
		t.store, first, ahead = newStore(t), st.kept[name], st.readAhead()
	}
	t.most = b.cfg.Capacity
	if overflow > 0 {
		t.most = math.MaxInt // the disk takes it, in more than one write
	}
	t.mu.core = queue.NewTopic(queue.Config{
		Capacity:     b.cfg.Capacity,
		Overflow:     overflow,
		WriteThrough: t.through,
		MaxInFlight:  b.cfg.MaxMsgTimeout,
		Rand:         rand.New(rand.NewPCG(b.cfg.Seed, hash(name))),

		MaxBackdating: b.cfg.MaxBackdating,
		MaxUnfinished: unfinished,
		ReadAhead:     ahead,
		First:         first,
		Begin:         b.now(),
	})
	if t.store != nil {
		t.store.setRetention(nil)
	}
	t.mu.pacing = pacing{all: b.cfg.Pacing, most: b.cfg.MaxWeight, core: t.mu.core, now: b.now}
	t.mu.consumers = make(map[queue.ConsumerID]*Subscription)
	t.reported.at = b.now() // the first interval begins with the topic
	t.room.L = &t.mu
	t.coarse = newAlarm(&b.workers, b.now, newCoarseTimer, t.tick)
	t.sharp = newAlarm(&b.workers, b.now, newSharpTimer, t.tick)
	if c, ok := b.cfg.Presets[name]; ok {
		s := t.begin() // no other goroutine has it yet
		t.agree(c, s)
		t.end(s)
	}
	return t
}

// step is one pass through the machine and what must be done after it.
type step struct {
	fx     queue.Effects
	msgs   []*queue.Message // scratch of a publisher
	batch  batch
	woken  []*Subscription
	coarse mono.Time
	sharp  mono.Time
	tell   bool // the store has something to do
	listed bool // a channel has come or gone
	record bool // what is recorded of the topic has changed otherwise
}

func (b *shared) newStep() *step {
	s := new(step)
	s.batch.gather = func(body []byte) {
		s.batch.like.Body = body
		s.msgs = append(s.msgs, b.message(s.batch.wall, &s.batch.like))
	}
	return s
}

// begin takes the lock. Every begin is followed by end. What is done then is done
// at a time that is read under the lock: a contract is kept by the times at which
// messages leave, and one who has waited for the lock has an old one.
func (t *Topic) begin() *step {
	s := t.shared.steps.Get().(*step)
	t.mu.Lock()
	t.mu.core.SetTight(t.tight(0))
	return s
}

// instant is now for a step that comes with a time: that, which is cheaper, where
// no contract is kept. Requires: mu held.
func (t *Topic) instant(now mono.Time) mono.Time {
	if t.mu.core.Limited() {
		return t.shared.now()
	}
	return now
}

// tight reports whether memory has no room for so many bytes more of the
// topic's: see Config.MaxMemory. Requires: mu held.
func (t *Topic) tight(more int) bool {
	return t.shared.cfg.MaxMemory > 0 && 5*int64(more) > t.fiveTimesLeft()
}

// fiveTimesLeft is five times as many bytes as the topic may take more: with x more
// it has held+x, and four times what is left is then 4*(most-all-x). Requires: mu
// held, a bound.
func (t *Topic) fiveTimesLeft() int64 {
	return 4*(t.shared.cfg.MaxMemory-t.shared.held.Load()) - t.mu.held
}

// discard gives a step back that was not begun.
func (t *Topic) discard(s *step) {
	clear(s.msgs)
	s.msgs = s.msgs[:0]
	t.shared.steps.Put(s)
}

// end hands deliveries to their subscriptions, releases the lock, and then
// wakes writers and sets alarms.
func (t *Topic) end(s *step) {
	var sub *Subscription // of the delivery before: often it is the same
	for _, d := range s.fx.Deliveries {
		if sub == nil || sub.id != d.Consumer {
			sub = t.mu.consumers[d.Consumer]
		}
		if sub == nil {
			panic(fmt.Sprintf("broker: topic %s: delivery to consumer %d, which is gone", t.name, d.Consumer))
		}
		if sub.outbox.len() == 0 {
			s.woken = append(s.woken, sub)
		}
		sub.outbox.push(d)
	}
	// What is left at the end is persist's.
	if st := t.store; st != nil && !t.mu.closed && (s.fx.Disk || st.unsaved()) {
		s.tell = s.fx.Disk || !st.running
		st.startLocked()
	}
	s.coarse, s.sharp = t.mu.core.ChannelDeadline(), t.mu.core.ReleaseDeadline()
	if t.mu.closed {
		s.coarse, s.sharp = mono.Never, mono.Never
	}
	if d := int64(s.fx.Held); d != 0 {
		t.mu.held += d
		t.shared.held.Add(d)
	}
	t.mu.Unlock()

	t.metrics.released(s.fx.Released)
	if trace := t.shared.cfg.Trace; trace != nil && len(s.fx.Released) > 0 {
		trace.write(t.name, s.fx.Released)
	}
	for _, sub := range s.woken {
		sub.notify()
	}
	if s.tell {
		t.store.notify()
	}
	t.coarse.noLater(s.coarse)
	t.sharp.noLater(s.sharp)
	if s.listed {
		t.shared.changed()
	} else if s.record {
		t.shared.recorded()
	}

	for _, m := range s.fx.Free {
		t.shared.pool.put(m)
	}
	clear(s.msgs)
	s.msgs = s.msgs[:0]
	s.listed, s.record, s.tell = false, false, false
	s.fx.Reset()
	clear(s.woken)
	s.woken = s.woken[:0]
	t.shared.steps.Put(s)
}

// do takes a step of which only f is its own.
func (t *Topic) do(f func(now mono.Time, s *step)) {
	s := t.begin()
	defer t.end(s)
	f(t.shared.now(), s)
}

func (t *Topic) tick(now mono.Time) {
	s := t.begin()
	if !t.mu.closed {
		t.mu.core.Tick(t.instant(now), &s.fx)
	}
	t.end(s)
}

// Name returns the topic's name.
func (t *Topic) Name() string { return t.name }

// deleteIfEphemeral removes an ephemeral topic that has lost its last channel.
// empty is a hint from a step that is over: what counts is what is there now.
func (t *Topic) deleteIfEphemeral(empty bool) {
	if empty && wire.Ephemeral(t.name) && t.forget(t) {
		t.close(true)
		t.shared.changed()
	}
}

// retire closes the topic for good if nothing needs it: it has no channel,
// and no contract, which the control plane or an operator believes to be kept. It reports
// whether it did; then the caller calls close.
func (t *Topic) retire() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed || len(t.mu.core.Channels()) > 0 || t.mu.core.Limited() {
		return false
	}
	t.mu.closed = true
	return true
}

// retireUnused closes the topic for good if it holds no message and no
// connection publishes to it, and reports whether it did; then the caller calls
// close. Requires: storing held.
func (t *Topic) retireUnused() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	held, _ := t.heldLocked(0)
	if t.mu.closed || held > 0 || t.mu.publishers > 0 {
		return false
	}
	t.mu.closed = true
	return true
}

// Empty discards the messages that wait in the topic itself, as EmptyChannel does.
func (t *Topic) Empty() {
	t.do(func(now mono.Time, s *step) { t.mu.core.Empty(now, &s.fx) })
	t.store.settled()
}

// Pause stops releases.
func (t *Topic) Pause() {
	t.do(func(_ mono.Time, s *step) {
		s.record = true
		t.mu.core.Pause()
	})
}

// Unpause resumes them.
func (t *Topic) Unpause() {
	t.do(func(now mono.Time, s *step) {
		s.record = true
		t.mu.core.Unpause(now, &s.fx)
	})
}

// held returns how many messages the topic and its channels hold, each channel
// counted apart, and whether a subscriber, or time until end, will still move
// any of them.
func (t *Topic) held(end mono.Time) (n int, moving bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.heldLocked(end)
}

// heldLocked requires mu held.
func (t *Topic) heldLocked(end mono.Time) (n int, moving bool) {
	core := t.mu.core
	comes := func(at mono.Time) bool { return at != mono.Never && at <= end }
	n = core.Waiting()
	subscribed := false
	for _, c := range core.Channels() {
		n += c.Depth()
		if c.Consumers() > 0 && !c.Paused() {
			subscribed = true
			moving = moving || c.Ready() > 0 || c.InFlight() > 0 || comes(c.Deadline())
		}
	}
	return n, moving || subscribed && comes(core.ReleaseDeadline())
}

// keep has all that the topic holds stored, if it has a disk, while it goes on.
func (t *Topic) keep() {
	if t.store == nil {
		return
	}
	s := t.begin()
	if !t.mu.closed {
		t.mu.core.Keep(&s.fx)
	}
	t.end(s)
}

// stop ends the topic's releases and deliveries; close is to follow.
func (t *Topic) stop() {
	t.mu.Lock()
	t.mu.core.Stop()
	t.mu.Unlock()
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
	t.mu.capture = nil
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
