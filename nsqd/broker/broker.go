// Package broker runs the queue machine of nsqd/queue. It owns the table of topics, the
// lock and the alarms of each topic, the hand-over of deliveries to subscribers, and the
// reported stats. Connections (nsqd/conn), HTTP (nsqd/httpapi) and the control plane
// (nsqd/agent) use the broker.
//
// A Topic consists of a runner, which executes the machine's steps under a lock, and parts
// on top of the runner: intake accepts publications, terms holds the contract, store
// accesses the log. The parts know the runner but not the topic.
//
// The package must not know frames, sockets or gRPC.
//
// Lock order: runner.storing, then Broker.mu, then runner.mu, then metrics.mu. No lock is
// held while a subscriber is notified or an alarm is set, except runner.storing.
// runner.storing is held during writes to the disk; only publishers to the same disk wait
// for it, and callers that empty or end the topic. The locks of metadataWriter and health
// are taken alone, or under runner.storing.
package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Errors in addition to the errors of nsqd/queue.
var (
	// ErrGone: the topic, channel or subscription has been deleted.
	ErrGone = errors.New("deleted")
	// ErrRetired: the topic has moved to other brokers and accepts no messages here.
	ErrRetired = errors.New("the topic has moved to other brokers")
	// ErrUnknownTopic: the topic does not exist, and this broker may not create it.
	ErrUnknownTopic = errors.New("no such topic on this broker")
	// ErrUnknownChannel: the topic has no such channel.
	ErrUnknownChannel = queue.ErrUnknownChannel
	// ErrDraining: the broker is shutting down and accepts nothing.
	ErrDraining = errors.New("broker is shutting down")
	// ErrInUse: the topic holds messages, or connections publish to it.
	ErrInUse = errors.New("in use")
	// ErrUnavailable: the topic's stream has not answered since the broker started. ErrUnavailable is
	// also an ErrStorage.
	ErrUnavailable = fmt.Errorf("%w: the JetStream stream of the topic is unavailable since the broker started", ErrStorage)
	// ErrBusy: the operation would block, but the caller does not wait.
	ErrBusy = errors.New("operation would block")
	// ErrBadName: the name of a topic or channel violates the protocol's rules.
	ErrBadName = errors.New("invalid name")
	// ErrTooManyConsumers: the channel has the maximum number of subscribers.
	ErrTooManyConsumers = errors.New("channel has the maximum number of consumers")
	// ErrTooManyTopics: the broker has the maximum number of topics.
	ErrTooManyTopics = errors.New("broker has the maximum number of topics")
	// ErrTooManyChannels: the topic or the broker has the maximum number of channels.
	ErrTooManyChannels = errors.New("maximum number of channels reached")
)

// Config is the configuration of a broker. A Config is immutable.
type Config struct {
	// Capacity is the maximum number of messages a topic may hold before
	// release, and the maximum depth of a channel; >= 1.
	Capacity int
	// MaxMemory bounds the bytes of all messages in memory: bodies, plus queue.Overhead per
	// message; 0: unlimited. If a topic holds more than four times the free memory, or
	// would with a new message, the topic behaves as if its Capacity were used up. So one
	// backlog takes at most four fifths of the memory, and other topics still find room.
	MaxMemory int64
	// MaxMsgTimeout bounds the time that a subscriber can keep a message by touching it.
	MaxMsgTimeout time.Duration
	// RejectAfter is the access delay above which a topic with the policy "reject" refuses
	// messages.
	RejectAfter time.Duration
	// MaxBackdating bounds the time between a message's token and its release, for topics
	// with a contract; in [0, tokenbucket.Horizon].
	MaxBackdating time.Duration
	// AutoCreate lets PUB and SUB create topics, as in NSQ. It is off if a loaddistributor
	// places topics; otherwise a publisher on the wrong broker would escape its contract.
	AutoCreate bool
	// Pacing is the mode of topics without their own mode. PaceOff disables pacing for all
	// topics.
	Pacing PaceMode
	// MaxWeight is the maximum weight of a publisher without a weight from the topic, up to
	// 255; 0 counts as 1.
	MaxWeight int
	// Presets are the contracts of a standalone broker, by topic. Such a topic gets the
	// contract on creation, also after a deletion. A preset has priority over a recorded
	// contract. The bucket is initially empty.
	Presets map[string]metadata.Contract
	// MaxChannelConsumers bounds the subscribers of each channel; 0: unlimited.
	MaxChannelConsumers int
	// MaxTopics, MaxTopicChannels and MaxChannels bound the topics, the channels per topic
	// and the channels in total; 0: unlimited. Restored topics and channels may exceed the
	// bounds.
	MaxTopics, MaxTopicChannels, MaxChannels int
	// Channels returns the channels of a topic on other brokers, before the topic is
	// created here, so that the channels exist from the first message on. Channels may
	// block; the caller holds no lock. Invalid names are ignored. Nil: no channels.
	Channels func(topic string) []string
	// Confirm reports a durable channel to the control plane. created is the catalog's
	// version at which the control plane created the channel, or 0. Confirm returns when
	// all connected brokers of the topic have the channel, or after a timeout. It returns
	// ErrTooManyChannels if the topic may not have the channel, and another error if the
	// answer is unknown. The caller holds no lock. Nil: there is no control plane.
	Confirm func(topic, channel string, created uint64) error
	// Changed is called after the creation or deletion of topics or channels, by any
	// goroutine, without a lock. Changed must not block. May be nil.
	Changed func()
	// EndToEnd is the window of the latencies from arrival to FIN; 0: not measured.
	EndToEnd time.Duration
	// Storage stores messages that do not fit into memory; nil: no storage.
	Storage *Storage
	// DeadLetter publishes a message to a topic on another broker, and returns after the
	// message is accepted. Nil: dead letters remain in their channel until this broker
	// carries the topic.
	DeadLetter func(ctx context.Context, topic string, body []byte) error
	// Log receives failures to store dead letters; may be nil.
	Log *slog.Logger
	// Trace records every release; may be nil.
	Trace *Trace
	// Seed seeds the random choice for sampling subscribers.
	Seed uint64
	// Now reads the clock; nil means clock.Mono.
	Now func() mono.Time
}

// Validate returns all faults, joined.
func (c Config) Validate() error {
	var errs faults.List
	errs.If(c.Capacity < 1, "--mem-queue-size %d is less than 1 message", c.Capacity)
	errs.If(c.MaxMemory < 0, "--max-memory-bytes %d is negative", c.MaxMemory)
	errs.If(c.MaxMsgTimeout <= 0, "--max-msg-timeout %v is not positive", c.MaxMsgTimeout)
	errs.If(c.RejectAfter < 0, "--reject-after %v is negative", c.RejectAfter)
	errs.If(c.MaxBackdating < 0 || c.MaxBackdating > tokenbucket.Horizon, "--max-backdating %v is outside [0, %v]", c.MaxBackdating, tokenbucket.Horizon)
	errs.If(c.MaxChannelConsumers < 0, "--max-channel-consumers %d is negative", c.MaxChannelConsumers)
	errs.If(c.MaxTopics < 0 || c.MaxTopicChannels < 0 || c.MaxChannels < 0, "--max-topics %d, --max-topic-channels %d and --max-channels %d: none may be negative", c.MaxTopics, c.MaxTopicChannels, c.MaxChannels)
	errs.If(c.MaxWeight < 0 || c.MaxWeight > math.MaxUint8, "--max-weight %d: want 1 to %d", c.MaxWeight, math.MaxUint8)
	errs.If(c.EndToEnd < 0, "--e2e-processing-latency-window-time %v is negative", c.EndToEnd)
	return errs.Err()
}

// Broker is the table of topics.
type Broker struct {
	shared  *shared
	closing chan struct{} // closed by Close

	reported []*Topic // topics of the last report; owned by Report's caller

	mu struct {
		sync.RWMutex
		topics map[string]*Topic
		asked  map[string]chan struct{} // topics being created; the channel is closed afterwards
		closed bool
	}
}

// New returns a broker without topics.
func New(cfg Config) (*Broker, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	b := &Broker{shared: newShared(cfg), closing: make(chan struct{})}
	b.shared.fenced = b.yield
	b.shared.letters = newDeadLetters(&b.shared.workers, cfg.Log, b.publishDeadLetter)
	if cfg.Storage != nil {
		b.shared.metadataWriter = newMetadataWriter(cfg.Storage.cfg, &b.shared.workers, b.metadata, b.topicRecord)
	}
	b.mu.topics = make(map[string]*Topic)
	b.mu.asked = make(map[string]chan struct{})
	return b, nil
}

// Memory returns the bytes of messages in memory and their maximum, or 0 if unlimited.
func (b *Broker) Memory() (held, most int64) { return b.shared.held.Load(), b.shared.cfg.MaxMemory }

// Now returns the broker's time, for arrival times of callers.
func (b *Broker) Now() mono.Time { return b.shared.now() }

// Topic returns the named topic, or ErrUnknownTopic. It does not allocate.
func (b *Broker) Topic(name []byte) (*Topic, error) {
	b.mu.RLock()
	t := b.mu.topics[string(name)]
	b.mu.RUnlock()
	if t == nil {
		return nil, ErrUnknownTopic
	}
	return t, nil
}

// TopicForClient returns the topic for a PUB or SUB, and creates the topic if AutoCreate is
// set.
// Errors: ErrUnknownTopic, ErrBadName, ErrDraining, ErrTooManyTopics.
func (b *Broker) TopicForClient(name []byte) (*Topic, error) {
	t, err := b.Topic(name)
	if err != nil && b.shared.cfg.AutoCreate {
		return b.CreateTopic(string(name))
	}
	return t, err
}

// CreateTopic returns the topic, creating it if necessary.
// Errors: ErrBadName, ErrDraining, ErrTooManyTopics.
func (b *Broker) CreateTopic(name string) (*Topic, error) {
	if !wire.ValidTopicName(name) {
		return nil, fmt.Errorf("topic %q: %w", name, ErrBadName)
	}
	for {
		t, asked, err := b.askFor(name)
		if t != nil || err != nil {
			return t, err
		}
		if asked != nil { // by another caller; many clients may arrive at once
			<-asked
			continue
		}
		var channels []string
		if b.shared.cfg.Channels != nil {
			channels = b.shared.cfg.Channels(name)
		}
		t, err = b.createTopic(name, channels)
		if t != nil {
			b.shared.changed(name)
		}
		return t, err
	}
}

// OrderTopic is like CreateTopic, but returns after the topic is stored durably.
// Errors: as CreateTopic, and ErrStorage. After ErrStorage a created topic is removed,
// unless it is already in use.
func (b *Broker) OrderTopic(name string) (*Topic, error) {
	_, unknown := b.Topic([]byte(name))
	t, err := b.CreateTopic(name)
	if err != nil {
		return nil, err
	}
	if err := b.shared.Recorded(); err != nil {
		if unknown != nil {
			b.undo(t)
		}
		return nil, fmt.Errorf("topic %q: %w", name, err)
	}
	return t, nil
}

// undo removes a topic that could not be stored, unless the topic is in use. Like a refused
// order, the topic is not in the metadata file afterwards, unless the disk still fails.
func (b *Broker) undo(t *Topic) {
	t.runner.storing.Lock()
	unused := b.forget(t, func() bool { return t.unusedLocked() && len(t.runner.mu.consumers) == 0 })
	t.runner.storing.Unlock()
	if unused {
		t.close(true)
		b.shared.changed(t.runner.name)
		t.orders.recant()
	}
}

func (b *Broker) newTopic(name string) *Topic { return newTopic(b.shared, name, b.forget, b.has) }

// askFor returns the topic. If another caller is creating the topic, askFor returns a
// channel that is closed afterwards. If askFor returns neither, the caller must call
// createTopic.
func (b *Broker) askFor(name string) (t *Topic, asked <-chan struct{}, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if t := b.mu.topics[name]; t != nil {
		return t, nil, nil
	}
	if b.mu.closed || b.shared.draining.Load() {
		return nil, nil, ErrDraining
	}
	if asked := b.mu.asked[name]; asked != nil {
		return nil, asked, nil
	}
	if most := b.shared.cfg.MaxTopics; most > 0 && len(b.mu.topics)+len(b.mu.asked) >= most {
		b.shared.refused.topics.Add(1)
		return nil, nil, ErrTooManyTopics
	}
	b.mu.asked[name] = make(chan struct{})
	return nil, nil, nil
}

// createTopic creates the topic. Requires: askFor returned nothing.
func (b *Broker) createTopic(name string, channels []string) (*Topic, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.mu.asked[name])
	delete(b.mu.asked, name)
	if b.mu.closed || b.shared.draining.Load() {
		return nil, ErrDraining
	}
	t := b.newTopic(name)
	s := t.runner.begin() // no other goroutine uses the topic yet
	for _, c := range channels {
		if wire.ValidChannelName(c) {
			_, _ = t.channels.channel(b.shared.now(), c, s, false) // over the limit: its first subscriber tries again
		}
	}
	s.listed = false // the caller reports the change, without b.mu
	t.runner.end(s)
	b.mu.topics[name] = t
	return t, nil
}

// Refused returns the number of topics and channels that were refused because of the
// limits.
func (b *Broker) Refused() (topics, channels uint64) {
	return b.shared.refused.topics.Load(), b.shared.refused.channels.Load()
}

// DeleteTopic deletes a topic with its messages and ends its subscriptions. It returns
// after the topic's record and log are removed from the disk.
// Errors: ErrUnknownTopic; ErrUnavailable, since the topic would reappear; ErrDraining after
// Close, which leaves the topics to the next process; ErrStorage. After ErrStorage either
// nothing has changed, or the topic is gone until the next start.
func (b *Broker) DeleteTopic(name string) error {
	t, err := b.Topic([]byte(name))
	if err != nil {
		return err
	}
	err = b.unrecord(t, func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		switch {
		case b.mu.closed:
			return ErrDraining
		case b.mu.topics[name] != t: // another caller has deleted the topic
			return ErrUnknownTopic
		case t.runner.isUnavailable():
			return ErrUnavailable
		}
		delete(b.mu.topics, name)
		t.runner.stop() // before a new topic of this name, with a new bucket, can exist
		return nil
	})
	if err != nil {
		return err
	}
	return b.remove(t)
}

// remove ends a topic that is no longer in b's list, and returns when its log is removed.
// Otherwise the topic would reappear after a crash.
func (b *Broker) remove(t *Topic) error {
	t.close(true)
	b.shared.listed()
	if t.store == nil {
		return nil
	}
	<-t.store.gone
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	if err := t.store.unremoved; err != nil {
		return fmt.Errorf("%w: the log of topic %q is not removed: %w", ErrStorage, t.runner.name, err)
	}
	return nil
}

// unrecord removes the record of a topic, and then calls remove. After an error the record
// is unchanged.
func (b *Broker) unrecord(t *Topic, remove func() error) error {
	if t.runner.isUnavailable() {
		return ErrUnavailable
	}
	none := edit(func(*metadata.Topic) bool { return false })
	err := t.orders.record(&none)
	refused := err != nil
	if !refused {
		err = remove()
	}
	t.runner.mu.Lock()
	differs := t.orders.forgetEdit(&none, err == nil)
	t.runner.mu.Unlock()
	if differs {
		b.shared.recorded(t.runner.name)
	}
	if refused {
		t.orders.recant()
	}
	return err
}

// DeleteUnused deletes a topic that holds no messages and is either retired or without
// publishers. Other topics are unchanged. A concurrent message is either held, so the topic
// remains, or not accepted.
// Errors: ErrUnknownTopic, ErrInUse, ErrStorage; after ErrStorage see DeleteTopic.
func (b *Broker) DeleteUnused(name string) error {
	t, err := b.Topic([]byte(name))
	if err != nil {
		return err
	}
	inUse := fmt.Errorf("topic %q: %w", name, ErrInUse)
	t.runner.mu.Lock()
	unused := t.unusedLocked()
	t.runner.mu.Unlock()
	if !unused {
		return inUse
	}
	err = b.unrecord(t, func() error {
		t.runner.storing.Lock() // otherwise a message could be on its way to the disk
		defer t.runner.storing.Unlock()
		if !b.forget(t, t.unusedLocked) {
			return inUse
		}
		return nil
	})
	if err != nil {
		return err
	}
	return b.remove(t)
}

// unusedLocked reports whether the topic holds no messages and is either retired or without
// publishers.
// Requires: mu held.
func (t *Topic) unusedLocked() bool {
	held, _ := t.runner.heldLocked(0)
	return held == 0 && (t.intake.publishers == 0 || t.runner.mu.retired) && !t.runner.unavailableLocked()
}

// forget closes t and removes t from the table, if unneeded returns true, in one critical
// section. So no caller finds the topic any more, and no caller that already has the topic can
// subscribe. forget reports whether it removed the topic; then the caller must call close.
// forget calls unneeded with t.mu held.
func (b *Broker) forget(t *Topic, unneeded func() bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	if b.mu.closed || b.mu.topics[t.runner.name] != t || t.runner.mu.closed || !unneeded() {
		return false
	}
	t.runner.mu.closed = true
	delete(b.mu.topics, t.runner.name)
	return true
}

// has reports whether the table contains t.
func (b *Broker) has(t *Topic) bool {
	now, _ := b.Topic([]byte(t.runner.name))
	return now == t
}

// Topics returns the topics, sorted by name.
func (b *Broker) Topics() []*Topic {
	b.mu.RLock()
	topics := make([]*Topic, 0, len(b.mu.topics))
	for _, t := range b.mu.topics {
		topics = append(topics, t)
	}
	b.mu.RUnlock()
	slices.SortFunc(topics, func(a, b *Topic) int { return cmp.Compare(a.runner.name, b.runner.name) })
	return topics
}

// Drain refuses new publications and stores the messages of all topics. Drain waits until
// subscribers have finished every message that they can get before ctx ends, or until ctx
// ends. It returns the number of messages still held. Once stored, these messages survive a
// kill of the process.
func (b *Broker) Drain(ctx context.Context) (left int) {
	b.shared.draining.Store(true)
	end := mono.Never
	if at, ok := ctx.Deadline(); ok {
		end = b.shared.now().Add(time.Until(at))
	}
	for _, t := range b.Topics() {
		t.storeAll()
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		held, moving := 0, false
		for _, t := range b.Topics() {
			h, m := t.runner.held(end)
			held += h
			moving = moving || m
		}
		if !moving {
			return held
		}
		select {
		case <-ctx.Done():
			return held
		case <-tick.C:
		}
	}
}

// Close ends all subscriptions and waits for the broker's goroutines. With a Storage, all
// held messages are then on disk, and all topics and channels are recorded. The error names
// the topics for which this failed.
func (b *Broker) Close() error {
	b.shared.draining.Store(true)
	b.shared.batches.Lock() // no batch begins from now on
	b.mu.Lock()
	closed := b.mu.closed
	b.mu.closed = true
	b.mu.Unlock()
	b.shared.batches.Unlock()
	if closed {
		return nil
	}
	close(b.closing)
	b.shared.letters.stop()
	for _, t := range b.Topics() {
		t.close(false)
	}
	if b.shared.metadataWriter != nil {
		b.shared.metadataWriter.end()
	}
	b.shared.workers.Wait()
	if b.shared.cfg.Storage == nil {
		return nil
	}
	stores := b.stores()
	_ = inParallel(stores, (*store).makeRoom) // failures caused by a lack of room are reported below
	_ = inParallel(stores, (*store).prepareExit)
	recorded := b.shared.metadataWriter.write(true)
	if recorded != nil { // a remaining mark would look like a deleted log
		for _, st := range stores {
			st.obsolete = false
		}
	}
	var stored atomic.Int64
	var teller sync.WaitGroup
	defer teller.Wait()
	done := make(chan struct{})
	defer close(done)
	teller.Go(func() { logProgress(b.shared.cfg.Storage.cfg.Log, &stored, len(stores), done) })
	unstored := inParallel(stores, func(st *store) error {
		defer stored.Add(1)
		return st.persist()
	})
	return errors.Join(recorded, unstored, b.shared.metadataWriter.finish())
}

// stores returns the stores of all topics.
func (b *Broker) stores() (all []*store) {
	for _, t := range b.Topics() {
		if t.store != nil {
			all = append(all, t.store)
		}
	}
	return all
}

// writers is the number of topics written concurrently. Several fsyncs at once cost a disk
// little more than one.
const writers = 16

// inParallel calls do for each store and returns the errors.
func inParallel(stores []*store, do func(*store) error) error {
	errs := make([]error, len(stores))
	var all errgroup.Group
	all.SetLimit(writers)
	for i, st := range stores {
		all.Go(func() error {
			errs[i] = do(st)
			return nil
		})
	}
	_ = all.Wait()
	return errors.Join(errs...)
}

// progressInterval is the interval of progress messages during the shutdown.
const progressInterval = 5 * time.Second

// logProgress logs the number of stored topics every progressInterval, until done is
// closed. There is no deadline for a slow disk; the log shows that the broker does not
// hang.
func logProgress(log *slog.Logger, stored *atomic.Int64, topics int, done <-chan struct{}) {
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			log.Info("storing the messages of the topics before the exit", "stored", stored.Load(), "topics", topics)
		}
	}
}
