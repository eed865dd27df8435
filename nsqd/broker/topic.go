package broker

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/stats"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Topic runs one queue.Topic: every step happens under mu, and what it causes
// (wake-ups, alarms) after mu is released.
type Topic struct {
	// Set once.
	name    string
	broker  *Broker
	store   *store // nil: it has no disk
	through bool   // everything published is stored first
	most    int    // messages that one batch may have

	// Timeouts and deferrals need milliseconds; releases need the microseconds
	// that a token takes. Only limited topics wait for a release, so only they
	// pay for the sharp alarm.
	coarse, sharp *alarm

	mu struct {
		sync.Mutex
		core      *queue.Topic
		consumers map[queue.ConsumerID]*Subscription
		slo       SLO
		contract  *metadata.Contract  // to be restored; not changed, but replaced. Nil: none, or the preset one
		retain    *metadata.Retention // its own; nil: StorageConfig.Retain
		identity  metadata.Identity   // of the topic, as the control plane says; zero: not known
		closed    bool
		held      int64 // the topic's part of Broker.held
		// publishers is the number of open connections that have published here.
		publishers int
		capture    *capture // nil: nobody wants one
		captures   uint64   // ever begun
		// endToEnd has the channels of which something was finished lately.
		endToEnd map[*queue.Channel]*stats.Window
	}
	// latency is mu.slo's, for those who record latencies; atomic, written under
	// mu. A stale read counts a message by the SLO of a moment ago.
	latency atomic.Int64
	// room is told when the topic's backlog may have room again, or never will.
	room    sync.Cond // on mu
	metrics metrics

	// storing orders the publishers of a topic whose messages go through the
	// disk: the order there is the topic's order. Taken before mu.
	storing sync.Mutex
}

// SLO is what the topic's latencies are counted against.
type SLO struct {
	Quantile float64       // in (0, 1); 0: no SLO
	Latency  time.Duration // of delivery
}

func newTopic(b *Broker, name string) *Topic {
	t := &Topic{name: name, broker: b}
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
	t.setRetention(nil)
	t.mu.consumers = make(map[queue.ConsumerID]*Subscription)
	t.metrics.mu.reported.at = b.now() // the first interval begins with the topic
	t.room.L = &t.mu
	t.coarse = newAlarm(&b.workers, b.now, newCoarseTimer, t.tick)
	t.sharp = newAlarm(&b.workers, b.now, newSharpTimer, t.tick)
	if c, ok := b.cfg.Presets[name]; ok {
		s := t.begin() // nobody else has it yet
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

// batch makes messages of the bodies of one PublishBatch.
type batch struct {
	gather func(body []byte) // made once, since a closure is allocated
	like   Published
	wall   mono.Wall
}

func (b *Broker) newStep() *step {
	s := new(step)
	s.batch.gather = func(body []byte) {
		s.batch.like.Body = body
		s.msgs = append(s.msgs, b.message(s.batch.wall, s.batch.like))
	}
	return s
}

// begin takes the lock. Every begin is followed by end. What is done then is done
// at a time that is read under the lock: a contract is kept by the times at which
// messages leave, and whoever has waited for the lock has an old one.
func (t *Topic) begin() *step {
	s := t.broker.steps.Get().(*step)
	t.mu.Lock()
	t.mu.core.SetTight(t.tight(0))
	return s
}

// instant is now for a step that comes with a time: that, which is cheaper, where
// no contract is kept. Requires: mu held.
func (t *Topic) instant(now mono.Time) mono.Time {
	if t.mu.core.Limited() {
		return t.broker.now()
	}
	return now
}

// tight reports whether memory has no room for so many bytes more of the
// topic's: see Config.MaxMemory. Requires: mu held.
func (t *Topic) tight(more int) bool {
	return t.broker.cfg.MaxMemory > 0 && 5*int64(more) > t.fiveTimesLeft()
}

// fiveTimesLeft is five times as many bytes as the topic may take more: with x more
// it has held+x, and four times what is left is then 4*(most-all-x). Requires: mu
// held, a bound.
func (t *Topic) fiveTimesLeft() int64 {
	return 4*(t.broker.cfg.MaxMemory-t.broker.held.Load()) - t.mu.held
}

// discard gives a step back that was not begun.
func (t *Topic) discard(s *step) {
	clear(s.msgs)
	s.msgs = s.msgs[:0]
	t.broker.steps.Put(s)
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
		t.broker.held.Add(d)
	}
	t.mu.Unlock()

	t.metrics.released(s.fx.Released)
	if trace := t.broker.cfg.Trace; trace != nil && len(s.fx.Released) > 0 {
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
		t.broker.changed()
	} else if s.record {
		t.broker.recorded()
	}

	for _, m := range s.fx.Free {
		t.broker.pool.put(m)
	}
	s.listed, s.record, s.tell = false, false, false
	s.fx.Reset()
	clear(s.woken)
	s.woken = s.woken[:0]
	t.broker.steps.Put(s)
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

// Published is a message as its publisher gave it.
type Published struct {
	Body    []byte // copied
	Arrival stamp.Arrival
	Defer   time.Duration
	// From is who published it, to this topic; nil: not known.
	From *Publisher
	// Stored is set to where the messages are, for Sync; nil: nobody wants to know.
	Stored *Stored
	// NoWait is for a caller who may not wait for the disk: it gets ErrBusy, and
	// the same call without NoWait does what it was to do.
	NoWait bool
}

// Publish accepts one message.
// Errors: queue.ErrFull, *queue.OverLimitError, ErrGone, ErrDraining, ErrBusy.
func (t *Topic) Publish(now mono.Time, wall mono.Wall, p Published) error {
	s := t.broker.steps.Get().(*step)
	s.msgs = append(s.msgs, t.broker.message(wall, p))
	return t.put(now, s, p)
}

// Bodies is a sequence of message bodies, such as those of an MPUB.
type Bodies interface {
	Len() int
	Bytes() int // of all together
	Each(func(body []byte))
}

// A batch of more messages or bytes is large: who may not wait does not make
// messages of it, and others get a turn at processor and topic after each
// batchSlice of them.
const (
	largeBatch = 512
	largeBytes = 256 << 10
	batchSlice = 256
)

// PublishBatch accepts all the messages, or none. They are alike but for their
// bodies; p has none. Errors as for Publish.
func (t *Topic) PublishBatch(now mono.Time, wall mono.Wall, p Published, bodies Bodies) error {
	// A batch may be a million messages of one byte, of which copies take a
	// hundred times as much.
	if n := bodies.Len(); n > t.most {
		s := t.begin()
		defer t.end(s)
		if err := t.open(); err != nil {
			return err
		}
		return t.mu.core.Refuse(queue.ErrFull, n)
	}
	if bodies.Len() > largeBatch || bodies.Bytes() > largeBytes {
		return t.publishLarge(now, wall, p, bodies)
	}
	return t.publishBatch(now, wall, p, bodies)
}

func (t *Topic) publishBatch(now mono.Time, wall mono.Wall, p Published, bodies Bodies) error {
	s := t.broker.steps.Get().(*step)
	s.batch.like, s.batch.wall = p, wall
	bodies.Each(s.batch.gather)
	s.batch.like = Published{}
	return t.put(now, s, p)
}

// publishLarge makes nothing before it is known that there is room for it. What
// has to be in memory as a whole, since there is no disk behind it or it is
// stored by one write, counts as held from then on. Else the first slice is
// accepted or refused for all of the batch, and each one after it waits until
// the disk has taken those before; only the topic's deletion keeps it from coming,
// for Close waits.
func (t *Topic) publishLarge(now mono.Time, wall mono.Wall, p Published, bodies Bodies) (err error) {
	if p.NoWait {
		return ErrBusy
	}
	n, bytes := bodies.Len(), bodies.Bytes()+bodies.Len()*queue.Overhead
	whole := t.through || t.most < math.MaxInt
	s := t.begin()
	if err = t.takes(n); err == nil {
		err = t.mu.core.AdmitBatch(t.instant(now), n, p.Arrival.At, p.Arrival.At)
	}
	if err == nil && whole {
		if t.mu.core.Tick(t.instant(now), &s.fx); t.tight(bytes) || !t.through && !t.mu.core.Room(n) {
			err = t.mu.core.Refuse(queue.ErrFull, n)
		}
	}
	t.end(s)
	if err != nil {
		return err
	}
	if whole {
		t.broker.large <- struct{}{}
		defer func() { <-t.broker.large }()
		if t.through {
			t.broker.held.Add(int64(bytes))
			defer t.broker.held.Add(-int64(bytes))
		}
		return t.publishBatch(now, wall, p, bodies)
	}
	t.broker.batches.RLock()
	defer t.broker.batches.RUnlock()
	s = t.broker.steps.Get().(*step)
	rest := false
	put := func() {
		<-t.broker.large
		n := len(s.msgs)
		if err = t.accept(now, s, p, rest); err == nil {
			t.metrics.arrived(p.Arrival.Source, n)
		}
		s, rest = t.broker.steps.Get().(*step), true
	}
	bodies.Each(func(body []byte) {
		if err != nil {
			return
		}
		if len(s.msgs) == 0 {
			t.broker.large <- struct{}{}
		}
		p.Body = body
		if s.msgs = append(s.msgs, t.broker.message(wall, p)); len(s.msgs) == batchSlice {
			put()
		}
	})
	if len(s.msgs) > 0 {
		put()
	}
	t.discard(s)
	return err
}

// put accepts the step's messages, or none, and ends the step.
func (t *Topic) put(now mono.Time, s *step, p Published) error {
	n := len(s.msgs)
	var err error
	if t.through {
		if p.NoWait {
			for _, m := range s.msgs {
				t.broker.pool.put(m)
			}
			t.discard(s)
			return ErrBusy
		}
		err = t.publishThrough(s, p)
	} else {
		err = t.accept(now, s, p, false)
	}
	if err == nil {
		t.metrics.arrived(p.Arrival.Source, n)
	}
	return err
}

// takes is open for n messages that are published, which a log that is full refuses.
// Requires: mu held.
func (t *Topic) takes(n int) error {
	err := t.open()
	if err == nil && t.fullLog() {
		err = t.mu.core.Refuse(queue.ErrFull, n)
	}
	return err
}

// fullLog reports whether nothing more may be published since the topic's log is larger
// than it may be. What was accepted is written to it all the same.
func (t *Topic) fullLog() bool {
	if t.store == nil || t.broker.cfg.Storage.cfg.MaxLogBytes == 0 {
		return false
	}
	log, most := t.store.log.Load(), t.broker.cfg.Storage.cfg.MaxLogBytes
	return log != nil && log.Size() >= most && log.Needed() >= most
}

// accept puts the step's messages at the end of the topic's backlog in memory, and
// ends the step. With rest they belong to a batch of which the first part was
// accepted: then they are, unless the topic is gone.
func (t *Topic) accept(now mono.Time, s *step, p Published, rest bool) (err error) {
	bytes := 0
	for _, m := range s.msgs {
		bytes += m.Size()
	}
	open := func() error {
		if rest && !t.mu.closed {
			return nil
		}
		return t.open()
	}
	full := !rest && t.fullLog()
	room := func() bool {
		t.mu.core.SetTight(t.tight(bytes))
		return t.mu.core.Room(len(s.msgs))
	}
	t.mu.Lock()
	// With a disk, a full backlog is one that is being written: the publisher
	// waits for that, unless writing fails.
	for !full && open() == nil && !room() && t.spilling() {
		if p.NoWait {
			err = ErrBusy
			break
		}
		t.room.Wait()
	}
	if err == nil {
		err = open()
	}
	switch now = t.instant(now); {
	case err != nil:
	case full:
		err = t.mu.core.Refuse(queue.ErrFull, len(s.msgs))
	case rest:
		t.mu.core.Enter(now, &s.fx, s.msgs...)
	default:
		err = t.mu.core.Put(now, &s.fx, s.msgs...)
	}
	if err == nil {
		t.captureLocked(p.From, p.Arrival.At, len(s.msgs))
	} else { // they are still ours
		s.fx.Free = append(s.fx.Free, s.msgs...)
	}
	clear(s.msgs)
	s.msgs = s.msgs[:0]
	t.end(s)
	return err
}

// PublishEach accepts messages one by one, in order, under one hold of the lock,
// and appends to errs what became of each: nil, or an error of Publish. It
// leaves off after ErrBusy or ErrGone, and answers ErrBusy where Publish waits:
// always, if the topic's messages go through the disk.
func (t *Topic) PublishEach(now mono.Time, wall mono.Wall, row []Published, errs []error) []error {
	if t.through {
		return append(errs, ErrBusy)
	}
	s := t.broker.steps.Get().(*step)
	bytes := 0
	for _, p := range row {
		m := t.broker.message(wall, p)
		s.msgs = append(s.msgs, m)
		bytes += m.Size()
	}
	dealt := len(errs)
	t.mu.Lock()
	now = t.instant(now)
	short := t.tight(bytes) // for some of the row; which ones is looked at one by one
	t.mu.core.SetTight(short)
	if t.open() == nil && !t.fullLog() && t.mu.core.Takes(len(s.msgs)) { // one step for all is cheaper
		t.mu.core.Enter(now, &s.fx, s.msgs...)
		for i := range s.msgs {
			errs = append(errs, nil)
			t.metrics.arrived(row[i].Arrival.Source, 1)
			t.captureLocked(row[i].From, row[i].Arrival.At, 1)
		}
		clear(s.msgs)
		s.msgs = s.msgs[:0]
		t.end(s)
		return errs
	}
	for i, m := range s.msgs {
		err := t.takes(1)
		if short {
			t.mu.core.SetTight(t.tight(s.fx.Held + m.Size()))
		}
		// The store learns of what overflows here when the step ends.
		if err == nil && !t.mu.core.Room(1) && (t.spilling() || s.fx.Disk) {
			err = ErrBusy
		}
		if err == nil {
			err = t.mu.core.Put(now, &s.fx, m)
		}
		errs = append(errs, err)
		if err == nil {
			t.metrics.arrived(row[i].Arrival.Source, 1)
			t.captureLocked(row[i].From, row[i].Arrival.At, 1)
			continue
		}
		s.fx.Free = append(s.fx.Free, m)
		if err == ErrBusy || err == ErrGone {
			break
		}
	}
	s.fx.Free = append(s.fx.Free, s.msgs[len(errs)-dealt:]...)
	clear(s.msgs)
	s.msgs = s.msgs[:0]
	t.end(s)
	return errs
}

// spilling reports whether the topic's messages are being written to disk.
// Requires: mu held.
func (t *Topic) spilling() bool { return t.store != nil && t.store.running && !t.store.failing }

func (b *Broker) message(wall mono.Wall, p Published) *queue.Message {
	m := b.pool.get(len(p.Body))
	m.ID = b.newID()
	m.Body = append(m.Body, p.Body...)
	m.Timestamp = wall
	m.Arrival, m.Source = p.Arrival.At, p.Arrival.Source
	m.Defer = p.Defer
	m.Only, m.Attempts = nil, 0
	return m
}

// open reports why the topic takes no message. Requires: mu held.
func (t *Topic) open() error {
	switch {
	case t.broker.draining.Load(): // first: a publisher looks for a topic that is gone again
		return ErrDraining
	case t.mu.closed:
		return ErrGone
	}
	return nil
}

// Limit puts the topic under a contract without a share: it accepts, but
// releases nothing until a share comes. A topic that is limited keeps its share.
func (t *Topic) Limit(slo SLO, reject bool) {
	s := t.begin()
	t.mu.slo = slo
	t.latency.Store(int64(slo.Latency))
	t.mu.core.Limit(queue.OverLimit{Reject: reject, MaxDelay: t.broker.cfg.RejectAfter})
	t.end(s)
}

// SetShare replaces the share, with granted tokens moved to it, and returns
// the tokens given up. The topic is limited from then on.
func (t *Topic) SetShare(share tokenbucket.Share, granted tokenbucket.Tokens) tokenbucket.Tokens {
	return t.SetLeased(share, queue.Forever(share), granted)
}

// SetLeased is SetShare for as long as the lease says.
func (t *Topic) SetLeased(share tokenbucket.Share, lease queue.Lease, granted tokenbucket.Tokens) tokenbucket.Tokens {
	s := t.begin()
	now := t.broker.now()
	if !t.mu.core.Limited() {
		t.mu.core.Limit(queue.OverLimit{MaxDelay: t.broker.cfg.RejectAfter})
	}
	released := t.mu.core.SetLeased(now, share, lease, granted, &s.fx)
	t.end(s)
	return released
}

// Renew moves the ends of the share's lease, and reports whether it has a
// flexible part that has not lapsed.
func (t *Topic) Renew(flexUntil, until mono.Time) (flex bool) {
	s := t.begin()
	now := t.broker.now()
	if t.mu.core.Limited() {
		flex = t.mu.core.Renew(now, flexUntil, until, &s.fx)
	}
	t.end(s)
	return flex
}

// Contract puts the topic of a standalone broker under a contract. A topic that is
// limited already keeps the tokens it has, as far as they fit; any other begins with
// an empty bucket: what a full one would let go may have been let go before, by the
// same topic under the same contract before it was deleted or the broker restarted.
// After a restart the contract is the same, but for that of Config.Presets.
func (t *Topic) Contract(c tokenbucket.Share, reject bool) {
	s := t.begin()
	t.mu.contract = &metadata.Contract{RateMilli: int64(c.Rate), Burst: c.Burst, Reject: reject}
	t.agree(*t.mu.contract, s)
	s.record = true
	t.end(s)
}

// RemoveContract ends what Contract began; what waited for tokens is released. After a
// restart there is no contract, but for that of Config.Presets.
func (t *Topic) RemoveContract() {
	s := t.begin()
	t.mu.contract = nil
	t.mu.core.Unlimit(t.broker.now(), &s.fx)
	s.record = true
	t.end(s)
}

// agree puts the topic under c. Requires: mu held.
func (t *Topic) agree(c metadata.Contract, s *step) {
	t.mu.core.Limit(queue.OverLimit{Reject: c.Reject, MaxDelay: t.broker.cfg.RejectAfter})
	t.mu.core.SetShare(t.broker.now(), c.Share(), 0, &s.fx)
}

// restoreContract is Contract of an earlier process. One that is preset stands.
func (t *Topic) restoreContract(c *metadata.Contract) {
	s := t.begin()
	if !t.mu.core.Limited() {
		t.mu.contract = c
		t.agree(*c, s)
	}
	t.end(s)
}

// CreateChannel creates the channel if need be.
// Errors: ErrBadName, ErrGone, ErrDraining, ErrTooManyChannels.
func (t *Topic) CreateChannel(name string) error { return t.createChannel(name, false) }

// createChannel creates more than there may be of those that are restored.
func (t *Topic) createChannel(name string, restored bool) error {
	if !wire.ValidChannelName(name) {
		return fmt.Errorf("channel %q: %w", name, ErrBadName)
	}
	s := t.begin()
	now := t.broker.now()
	defer t.end(s)
	if t.mu.closed {
		return t.open()
	}
	_, err := t.channel(now, name, s, restored)
	return err
}

// channel returns the channel, creating it if need be.
// Error: ErrTooManyChannels. Requires: mu held.
func (t *Topic) channel(now mono.Time, name string, s *step, restored bool) (*queue.Channel, error) {
	c := t.mu.core.Channel(name)
	if c == nil {
		b := t.broker
		all, own := int(b.channels.Add(1)), len(t.mu.core.Channels())+1
		if !restored && (b.cfg.MaxChannels > 0 && all > b.cfg.MaxChannels || b.cfg.MaxTopicChannels > 0 && own > b.cfg.MaxTopicChannels) {
			b.channels.Add(-1)
			b.refused.channels.Add(1)
			return nil, fmt.Errorf("channel %q of topic %q, %d channels, %d in all: %w", name, t.name, own-1, all-1, ErrTooManyChannels)
		}
		c = t.mu.core.CreateChannel(now, name, &s.fx)
		s.listed = true
	}
	return c, nil
}

// ChannelNames returns the names of the channels, sorted.
func (t *Topic) ChannelNames() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	channels := t.mu.core.Channels()
	names := make([]string, len(channels))
	for i, c := range channels {
		names[i] = c.Name()
	}
	return names
}

// DeleteChannel removes a channel with all it holds and ends its
// subscriptions. Error: ErrUnknownChannel.
func (t *Topic) DeleteChannel(name string) error {
	s := t.begin()
	now := t.broker.now()
	c := t.mu.core.Channel(name)
	if c == nil {
		t.end(s)
		return fmt.Errorf("channel %q: %w", name, ErrUnknownChannel)
	}
	if t.mu.closed { // its channels are being left to the next process
		defer t.end(s)
		return t.open()
	}
	t.removeChannel(now, c, s)
	empty := len(t.mu.core.Channels()) == 0
	t.end(s)
	t.settled() // or another of its name would have what it had, after a crash
	t.deleteIfEphemeral(empty)
	return nil
}

// removeChannel ends the channel's subscriptions and deletes it.
// Requires: mu held.
func (t *Topic) removeChannel(now mono.Time, c *queue.Channel, s *step) {
	for _, id := range c.ConsumerIDs() {
		sub := t.mu.consumers[id]
		t.detach(sub)
		s.woken = append(s.woken, sub)
	}
	if err := t.mu.core.DeleteChannel(now, c.Name(), &s.fx); err != nil {
		panic("broker: " + err.Error())
	}
	t.broker.channels.Add(-1)
	delete(t.mu.endToEnd, c)
	s.listed = true
}

// finished notes how long finished messages took from end to end, if that is
// measured. Requires: mu held.
func (t *Topic) finished(now mono.Time, c *queue.Channel, messages []*queue.Message) {
	span := t.broker.cfg.EndToEnd
	if span == 0 || len(messages) == 0 {
		return
	}
	w := t.mu.endToEnd[c]
	if w == nil {
		if t.mu.endToEnd == nil {
			t.mu.endToEnd = make(map[*queue.Channel]*stats.Window)
		}
		w = new(stats.Window)
		t.mu.endToEnd[c] = w
	}
	for _, m := range messages {
		w.Record(now, span, now.Sub(m.Arrival))
	}
}

// deleteIfEphemeral removes an ephemeral topic that has lost its last channel.
// empty is a hint from a step that is over: what counts is what is there now.
func (t *Topic) deleteIfEphemeral(empty bool) {
	if empty && wire.Ephemeral(t.name) && t.broker.forget(t) {
		t.close(true)
		t.broker.changed()
	}
}

// retire closes the topic to everybody if nothing needs it: it has no channel,
// and no contract, which whoever gave it believes to be kept. It reports
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

// retireUnused closes the topic to everybody if it holds no message and no
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

// EmptyChannel discards a channel's messages. A crash does not bring them back, unless
// the disk fails. Errors: ErrUnknownChannel, ErrDraining.
func (t *Topic) EmptyChannel(name string) error {
	err := t.onChannel(name, func(now mono.Time, c *queue.Channel, fx *queue.Effects) {
		t.mu.core.EmptyChannel(now, c, fx)
	})
	t.settled()
	return err
}

// PauseChannel stops the channel's deliveries. Errors: ErrUnknownChannel, ErrDraining.
func (t *Topic) PauseChannel(name string) error {
	return t.onChannel(name, func(_ mono.Time, c *queue.Channel, _ *queue.Effects) {
		t.mu.core.PauseChannel(c)
	})
}

// UnpauseChannel resumes them. Errors: ErrUnknownChannel, ErrDraining.
func (t *Topic) UnpauseChannel(name string) error {
	return t.onChannel(name, t.mu.core.UnpauseChannel)
}

func (t *Topic) onChannel(name string, do func(mono.Time, *queue.Channel, *queue.Effects)) error {
	s := t.begin()
	now := t.broker.now()
	defer t.end(s)
	c := t.mu.core.Channel(name)
	if c == nil {
		return fmt.Errorf("channel %q: %w", name, ErrUnknownChannel)
	}
	if t.mu.closed { // the next process would not know
		return t.open()
	}
	s.record = true // it may have been paused or unpaused
	do(now, c, &s.fx)
	return nil
}

// Empty discards the messages that wait in the topic itself, as EmptyChannel does.
func (t *Topic) Empty() {
	s := t.begin()
	t.mu.core.Empty(&s.fx)
	t.end(s)
	t.settled()
}

// Pause stops releases.
func (t *Topic) Pause() {
	s := t.begin()
	s.record = true
	t.mu.core.Pause()
	t.end(s)
}

// Unpause resumes them.
func (t *Topic) Unpause() {
	s := t.begin()
	now := t.broker.now()
	s.record = true
	t.mu.core.Unpause(now, &s.fx)
	t.end(s)
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
// stop, and whatever step somebody still takes finds nothing to release and
// nobody to deliver to. With remove its messages are let go, in memory and on
// disk, for connections may keep a deleted topic for as long as they are
// silent; without, they stay as they are, to be persisted.
func (t *Topic) close(remove bool) {
	// A publisher that is about to append must be through, or see the end: the
	// queue that it would open after that is nobody's, in the way of the topic's
	// next life, and comes back at the next start.
	t.storing.Lock()
	s := t.begin()
	now := t.broker.now()
	t.mu.closed = true
	t.mu.capture = nil
	t.mu.core.Stop()
	if remove {
		for _, c := range slices.Clone(t.mu.core.Channels()) {
			t.removeChannel(now, c, s)
		}
		t.mu.core.Empty(&s.fx)
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

// makeRoom deletes what is needed no more on disk: what is left to the next process
// may need the place.
// Requires: the topic is closed and the broker's workers have ended.
func (t *Topic) makeRoom() {
	if t.store != nil {
		t.store.scratch = new(scratch)
		_ = t.store.tryToSave() // what fails because of it says so
	}
}

// persistAll leaves all that the topic has to the next process.
// Requires: the topic is closed and the broker's workers have ended.
func (t *Topic) persistAll() error {
	if t.store == nil {
		return nil
	}
	return t.store.persist()
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
