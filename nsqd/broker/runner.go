package broker

import (
	"fmt"
	"sync"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// runner takes the steps of one queue.Topic: each happens under mu, and what it causes
// (wake-ups, alarms) after mu is released.
type runner struct {
	// Set once.
	name    string // of the topic
	shared  *shared
	disk    *disk // nil: there is none
	through bool  // everything published is stored first

	// Timeouts and deferrals need milliseconds; releases need the microseconds
	// that a token takes. Only limited topics wait for a release, so only they
	// pay for the sharp alarm.
	coarse, sharp *alarm

	mu struct {
		sync.Mutex
		core      *queue.Topic
		consumers map[queue.ConsumerID]*Subscription
		closed    bool
		retired   bool  // the topic has moved away: what it holds is delivered, nothing is taken
		held      int64 // the topic's part of Broker.held
		expiry    expirySettings
	}
	// room is told when the topic's backlog may have room again, or never will.
	room    sync.Cond // on mu
	metrics metrics

	// storing orders the publishers of a topic whose messages go through the
	// disk: the order there is the topic's order. Taken before mu.
	storing sync.Mutex
}

// disk is what the steps of a runner and its store tell one another.
type disk struct {
	// Set once.
	run     func() // of the store, in one of the workers while there is something to do
	workers *sync.WaitGroup
	wake    chan struct{} // 1 deep: there is something to write, to get or to save

	// Guarded by runner.mu.
	running bool
	stopped bool
	away    bool   // what is in the log is not restored yet, and nothing is taken until it is
	used    bool   // there is something in the log, so that cursors are to be saved
	saved   uint64 // queue.Topic.Changes of the last snapshot
}

// start runs the store if it does not run. Requires: mu held.
func (d *disk) start() {
	if !d.running && !d.stopped {
		d.running = true
		d.workers.Go(d.run)
	}
}

func (d *disk) notify() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// unsaved reports whether the snapshot is out of date. Requires: mu held.
func (r *runner) unsaved() bool { return r.disk.used && r.disk.saved != r.mu.core.Changes() }

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
	stored bool // the metadata file has what the step changed of the record
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
func (r *runner) begin() *step {
	s := r.shared.steps.Get().(*step)
	r.mu.Lock()
	r.mu.core.SetTight(r.tight(0))
	r.mu.core.HoldFrom(mono.Time(r.shared.holdFrom.Load()))
	return s
}

// instant is now for a step that comes with a time: that, which is cheaper, where
// no contract is kept. Requires: mu held.
func (r *runner) instant(now mono.Time) mono.Time {
	if r.mu.core.Limited() {
		return r.shared.now()
	}
	return now
}

// tight reports whether memory has no room for so many bytes more of the
// topic's: see Config.MaxMemory. Requires: mu held.
func (r *runner) tight(more int) bool {
	return r.shared.cfg.MaxMemory > 0 && 5*int64(more) > r.fiveTimesLeft()
}

// fiveTimesLeft is five times as many bytes as the topic may take more: with x more
// it has held+x, and four times what is left is then 4*(most-all-x). Requires: mu
// held, a bound.
func (r *runner) fiveTimesLeft() int64 {
	return 4*(r.shared.cfg.MaxMemory-r.shared.held.Load()) - r.mu.held
}

// discard gives a step back that was not begun.
func (r *runner) discard(s *step) {
	clear(s.msgs)
	s.msgs = s.msgs[:0]
	r.shared.steps.Put(s)
}

// end hands deliveries to their subscriptions, releases the lock, and then
// wakes writers and sets alarms.
func (r *runner) end(s *step) {
	for i := 0; i < len(s.fx.Dead); i++ { // a refused letter may have others handed out
		if d := s.fx.Dead[i]; !r.shared.letters.add(r.letter(d)) {
			r.mu.core.Bury(r.shared.now(), d, false, deadLetterRetry, &s.fx)
		}
	}
	var sub *Subscription // of the delivery before: often it is the same
	for _, d := range s.fx.Deliveries {
		if sub == nil || sub.id != d.Consumer {
			sub = r.mu.consumers[d.Consumer]
		}
		if sub == nil {
			panic(fmt.Sprintf("broker: topic %s: delivery to consumer %d, which is gone", r.name, d.Consumer))
		}
		if sub.outbox.len() == 0 {
			s.woken = append(s.woken, sub)
		}
		sub.outbox.push(d)
	}
	// What is left at the end is persist's.
	if d := r.disk; d != nil && !r.mu.closed && (s.fx.Disk || r.unsaved()) {
		s.tell = s.fx.Disk || !d.running
		d.start()
	}
	s.coarse, s.sharp = r.mu.core.ChannelDeadline(), r.mu.core.ReleaseDeadline()
	if r.mu.closed {
		s.coarse, s.sharp = mono.Never, mono.Never
	}
	if d := int64(s.fx.Held); d != 0 {
		r.mu.held += d
		r.shared.held.Add(d)
	}
	r.mu.Unlock()

	r.metrics.released(s.fx.Released)
	if trace := r.shared.cfg.Trace; trace != nil && len(s.fx.Released) > 0 {
		trace.write(r.name, s.fx.Released)
	}
	for _, sub := range s.woken {
		sub.notify()
	}
	if s.tell {
		r.disk.notify()
	}
	r.coarse.noLater(s.coarse)
	r.sharp.noLater(s.sharp)
	if s.record || s.listed && !s.stored {
		r.shared.recorded()
	}
	if s.listed {
		r.shared.listed()
	}

	for _, m := range s.fx.Free {
		r.shared.pool.put(m)
	}
	clear(s.msgs)
	s.msgs = s.msgs[:0]
	s.listed, s.record, s.stored, s.tell = false, false, false, false
	s.fx.Reset()
	clear(s.woken)
	s.woken = s.woken[:0]
	r.shared.steps.Put(s)
}

// do takes a step of which only f is its own.
func (r *runner) do(f func(now mono.Time, s *step)) {
	s := r.begin()
	defer r.end(s)
	f(r.shared.now(), s)
}

func (r *runner) tick(now mono.Time) {
	s := r.begin()
	if !r.mu.closed {
		r.mu.core.Tick(r.instant(now), &s.fx)
	}
	r.end(s)
}

// Name returns the topic's name.
func (r *runner) Name() string { return r.name }

// open reports why the topic takes no message. Requires: mu held.
func (r *runner) open() error {
	switch {
	case r.shared.draining.Load(): // first: a publisher looks for a topic that is gone again
		return ErrDraining
	case r.mu.closed:
		return ErrGone
	case r.awayLocked():
		return ErrAway
	}
	return nil
}

// takesPublishes is open for what is published.
func (r *runner) takesPublishes() error {
	err := r.open()
	if err == nil && r.mu.retired {
		return ErrRetired
	}
	return err
}

// awayLocked requires mu held.
func (r *runner) awayLocked() bool { return r.disk != nil && r.disk.away }

func (r *runner) isAway() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.awayLocked()
}

// held returns how many messages the topic and its channels hold, each channel
// counted apart, and whether a subscriber, or time until end, will still move
// any of them.
func (r *runner) held(end mono.Time) (n int, moving bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.heldLocked(end)
}

// heldLocked requires mu held.
func (r *runner) heldLocked(end mono.Time) (n int, moving bool) {
	core := r.mu.core
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

// stop ends the topic's releases and deliveries; close is to follow.
func (r *runner) stop() {
	r.mu.Lock()
	r.mu.core.Stop()
	r.mu.Unlock()
}

// channelStep is what a step does with a channel.
type channelStep func(now mono.Time, c *queue.Channel, s *step)

// onChannel takes a step that is about a channel.
func (r *runner) onChannel(name string, f channelStep) (err error) {
	r.do(func(now mono.Time, s *step) { err = r.channelStep(now, name, s, f) })
	return err
}

// channelStep requires mu held.
func (r *runner) channelStep(now mono.Time, name string, s *step, f channelStep) error {
	c, err := r.orderable(name)
	if err == nil {
		f(now, c, s)
	}
	return err
}

// orderable returns a channel for which an order can be carried out. Requires: mu held.
func (r *runner) orderable(name string) (*queue.Channel, error) {
	c := r.mu.core.Channel(name)
	switch {
	case c == nil:
		return nil, fmt.Errorf("channel %q: %w", name, ErrUnknownChannel)
	case r.mu.closed, r.awayLocked(): // the next process, or what comes back, would not know
		return nil, r.open()
	}
	return c, nil
}
