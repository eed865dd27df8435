package broker

import (
	"fmt"
	"sync"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// runner executes the steps of one queue.Topic. Each step runs under mu. Its effects
// (wake-ups, alarms) happen after mu is released.
type runner struct {
	// Set once.
	name         string // of the topic
	shared       *shared
	disk         *disk // nil without a disk
	writeThrough bool  // publications are stored before they are accepted

	// Timeouts and deferrals need milliseconds; releases need microseconds, the time of a
	// token. Only limited topics wait for releases, so only they use the sharp alarm.
	coarse, sharp *alarm

	mu struct {
		sync.Mutex
		core      *queue.Topic
		consumers map[queue.ConsumerID]*Subscription
		closed    bool
		retired   bool  // the topic has moved: it delivers its messages but accepts none
		uncreated bool  // retired, because the creation of the topic failed
		held      int64 // the topic's part of shared.held
		expiry    expirySettings
	}
	// room is signalled when the topic's backlog may have room, or never will.
	room    sync.Cond // on mu
	metrics metrics

	// storing orders publishers of a topic that stores messages before accepting them: the
	// order on disk is the topic's order. Taken before mu.
	storing sync.Mutex
}

// disk is the state that the steps of a runner share with its store.
type disk struct {
	// Set once.
	run     func() // runs the store, in a worker, while there is something to do
	workers *sync.WaitGroup
	wake    chan struct{} // 1 deep: there is something to write, read or save

	// Guarded by runner.mu.
	running     bool
	stopped     bool
	unavailable bool   // the log is not restored yet, and messages are refused until then
	used        bool   // the log has contents, so cursors must be saved
	saved       uint64 // queue.Topic.Changes at the last snapshot
}

// start starts the store if it is not running. Requires: mu held.
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
func (r *runner) unsaved() bool { return r.disk.used && r.disk.saved != r.mu.core.Log().Changes() }

// step is one pass through the machine, with the actions to do afterwards.
type step struct {
	fx        queue.Effects
	msgs      []*queue.Message // scratch of a publisher
	batch     batch
	woken     []*Subscription
	coarse    mono.Time
	sharp     mono.Time
	wakeStore bool // the store has something to do
	listed    bool // a channel was created or deleted
	stored    bool // the metadata file already has the changes of this step
	record    bool // the topic's record has changed otherwise
}

func (b *shared) newStep() *step {
	s := new(step)
	s.batch.gather = func(body []byte) {
		s.batch.like.Body = body
		s.msgs = append(s.msgs, b.message(s.batch.wall, &s.batch.like))
	}
	return s
}

// begin takes the lock. Every begin is followed by end. The caller reads the time under the
// lock: a contract depends on release times, and a time from before the wait for the lock
// would be old.
func (r *runner) begin() *step {
	s := r.shared.steps.Get().(*step)
	r.mu.Lock()
	r.mu.core.Log().SetTight(r.tight(0))
	return s
}

// instant returns the time for a step with a given time: now, which is cheaper, if the
// topic has no contract, otherwise the current time. Requires: mu held.
func (r *runner) instant(now mono.Time) mono.Time {
	if r.mu.core.Contract().Limited() {
		return r.shared.now()
	}
	return now
}

// tight reports whether memory lacks room for more bytes of the topic: see
// Config.MaxMemory.
// Requires: mu held.
func (r *runner) tight(more int) bool {
	return r.shared.cfg.MaxMemory > 0 && 5*int64(more) > r.fiveTimesLeft()
}

// fiveTimesLeft returns five times the bytes that the topic may add. With x more bytes the
// topic holds held+x, which must not exceed four times the free memory, 4*(most-all-x).
// Requires: mu held, MaxMemory > 0.
func (r *runner) fiveTimesLeft() int64 {
	return 4*(r.shared.cfg.MaxMemory-r.shared.held.Load()) - r.mu.held
}

// discard returns a step that was not begun.
func (r *runner) discard(s *step) {
	clear(s.msgs)
	s.msgs = s.msgs[:0]
	r.shared.steps.Put(s)
}

// end passes deliveries to their subscriptions, releases the lock, and then wakes writers
// and sets alarms.
func (r *runner) end(s *step) {
	for i := 0; i < len(s.fx.Dead); i++ { // burying a refused letter may add dead messages
		if d := s.fx.Dead[i]; !r.shared.letters.add(r.letter(d)) {
			r.mu.core.Bury(r.shared.now(), d, false, deadLetterRetry, &s.fx)
		}
	}
	var sub *Subscription // of the previous delivery, which often has the same consumer
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
	// After the topic is closed, persist stores the rest.
	if d := r.disk; d != nil && !r.mu.closed && (s.fx.Disk || r.unsaved()) {
		s.wakeStore = s.fx.Disk || !d.running
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

	r.metrics.recordReleased(s.fx.Released)
	if trace := r.shared.cfg.Trace; trace != nil && len(s.fx.Released) > 0 {
		trace.write(r.name, s.fx.Released)
	}
	for _, sub := range s.woken {
		sub.notify()
	}
	if s.wakeStore {
		r.disk.notify()
	}
	r.coarse.noLater(s.coarse)
	r.sharp.noLater(s.sharp)
	if s.record || s.listed && !s.stored {
		r.shared.recorded(r.name)
	}
	if s.listed {
		r.shared.listed()
	}

	for _, m := range s.fx.Free {
		r.shared.pool.put(m)
	}
	clear(s.msgs)
	s.msgs = s.msgs[:0]
	s.listed, s.record, s.stored, s.wakeStore = false, false, false, false
	s.fx.Reset()
	clear(s.woken)
	s.woken = s.woken[:0]
	r.shared.steps.Put(s)
}

// do runs f as a step.
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

// open returns an error if the topic accepts no messages. Requires: mu held.
func (r *runner) open() error {
	switch {
	case r.shared.draining.Load(): // first: on ErrGone a publisher looks for the topic again
		return ErrDraining
	case r.mu.closed:
		return ErrGone
	case r.unavailableLocked():
		return ErrUnavailable
	}
	return nil
}

// acceptsPublishes is open for publications. Requires: mu held.
func (r *runner) acceptsPublishes() error {
	err := r.open()
	if err == nil && r.mu.retired {
		return ErrRetired
	}
	return err
}

// unavailableLocked reports whether the topic is unavailable. Requires: mu held.
func (r *runner) unavailableLocked() bool { return r.disk != nil && r.disk.unavailable }

func (r *runner) isUnavailable() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unavailableLocked()
}

// held returns the number of messages in the topic and its channels, counted per channel.
// moving reports whether a subscriber, or time until end, will move any of them.
func (r *runner) held(end mono.Time) (n int, moving bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.heldLocked(end)
}

// heldLocked is held. Requires: mu held.
func (r *runner) heldLocked(end mono.Time) (n int, moving bool) {
	core := r.mu.core
	comes := func(at mono.Time) bool { return at != mono.Never && at <= end }
	n = core.Backlog().Waiting()
	subscribed := false
	for _, c := range core.Channels() {
		n += c.Depth()
		if c.Consumers().Len() > 0 && !c.Paused() {
			subscribed = true
			moving = moving || c.Ready() > 0 || c.InFlight() > 0 || comes(c.Deadline())
		}
	}
	return n, moving || subscribed && comes(core.ReleaseDeadline())
}

// stop ends the topic's releases and deliveries. close must follow.
func (r *runner) stop() {
	r.mu.Lock()
	r.mu.core.Stop()
	r.mu.Unlock()
}

// channelStep is a step on a channel.
type channelStep func(now mono.Time, c *queue.Channel, s *step)

// onChannel executes a step on a channel.
func (r *runner) onChannel(name string, f channelStep) (err error) {
	r.do(func(now mono.Time, s *step) { err = r.channelStep(now, name, s, f) })
	return err
}

// channelStep executes f on a channel. Requires: mu held.
func (r *runner) channelStep(now mono.Time, name string, s *step, f channelStep) error {
	c, err := r.orderable(name)
	if err == nil {
		f(now, c, s)
	}
	return err
}

// orderable returns a channel for which an order can be executed. Requires: mu held.
func (r *runner) orderable(name string) (*queue.Channel, error) {
	c := r.mu.core.Channel(name)
	switch {
	case c == nil:
		return nil, fmt.Errorf("channel %q: %w", name, ErrUnknownChannel)
	case r.mu.closed, r.unavailableLocked(): // the next process, or the restored topic, would not know the order
		return nil, r.open()
	}
	return c, nil
}
