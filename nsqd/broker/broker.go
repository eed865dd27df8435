package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// Refusals beyond those of nsqd/queue.
var (
	// ErrGone: the topic, channel or subscription was deleted meanwhile.
	ErrGone = errors.New("deleted")
	// ErrRetired: the topic has moved to other brokers and takes no more messages here.
	ErrRetired = errors.New("the topic has moved to other brokers")
	// ErrUnknownTopic: there is no such topic and none may be created here.
	ErrUnknownTopic = errors.New("no such topic on this broker")
	// ErrUnknownChannel: the topic has no such channel.
	ErrUnknownChannel = queue.ErrUnknownChannel
	// ErrDraining: the broker is shutting down and accepts nothing more.
	ErrDraining = errors.New("broker is shutting down")
	// ErrInUse: the topic holds messages, or connections publish to it.
	ErrInUse = errors.New("in use")
	// ErrAway: the topic's stream has not answered since the broker started. It is ErrStorage, too.
	ErrAway = fmt.Errorf("%w: nothing has answered for the topic's stream since the broker started", ErrStorage)
	// ErrBusy: the caller would have to wait, and said that it may not.
	ErrBusy = errors.New("would have to wait")
	// ErrBadName: a topic or channel name outside the protocol's rules.
	ErrBadName = errors.New("not a valid name")
	// ErrTooManyConsumers: the channel has as many subscribers as it may.
	ErrTooManyConsumers = errors.New("channel has as many consumers as it may")
	// ErrTooManyTopics: the broker has as many topics as it may.
	ErrTooManyTopics = errors.New("broker has as many topics as it may")
	// ErrTooManyChannels: the topic has as many channels as it may, or all topics have.
	ErrTooManyChannels = errors.New("as many channels as there may be")
)

// Config of a broker. Immutable.
type Config struct {
	// Capacity is the maximum number of messages a topic may hold before
	// release, and the maximum depth of a channel; >= 1.
	Capacity int
	// MaxMemory is how many bytes the messages that are held in memory may take,
	// those of all topics together: bodies, and queue.Overhead for each; 0: they
	// are not bounded. A topic that holds four times what is left, or would with
	// what is published, goes on as one whose Capacity is used up: so one backlog
	// gets four fifths at most, and others still find room.
	MaxMemory int64
	// MaxMsgTimeout is how long a subscriber may keep a message by touching it.
	MaxMsgTimeout time.Duration
	// RejectAfter is the access delay above which a topic with the policy
	// "reject" refuses a message.
	RejectAfter time.Duration
	// MaxBackdating is how far before its release a message of a topic with a
	// contract may have its token; in [0, tokenbucket.Horizon].
	MaxBackdating time.Duration
	// AutoCreate lets PUB and SUB create topics, as in NSQ. Off where a
	// loaddistributor places topics: a publisher on the wrong broker would
	// otherwise escape its contract.
	AutoCreate bool
	// Pacing is that of topics that say nothing of it; PaceOff is of all.
	Pacing PaceMode
	// MaxWeight is the weight that a publisher may have whom its topic does not give
	// one; 0 counts as 1.
	MaxWeight uint8
	// Presets are contracts by topic, of a standalone broker. Such a topic is under
	// its own from the moment it is made, again after it was deleted, and that goes
	// before a recorded one. Its bucket begins empty.
	Presets map[string]metadata.Contract
	// MaxChannelConsumers bounds the subscribers of each channel; 0: it does not.
	MaxChannelConsumers int
	// MaxTopics, MaxTopicChannels and MaxChannels bound the topics, the channels of
	// each, and those of all; 0: they do not. What an earlier process left is restored
	// in any case.
	MaxTopics, MaxTopicChannels, MaxChannels int
	// Channels returns the channels that a topic has on other brokers, when it
	// is about to be created here: they exist from its first message on. May
	// take its time, no lock is held. Names that are not valid are passed over.
	// Nil: none.
	Channels func(topic string) []string
	// Confirm reports a durable channel to the control plane, with the version at which that
	// created it, 0: not yet. It returns when all connected brokers of the topic have the
	// channel, or when that takes too long. ErrTooManyChannels: the topic may not have the
	// channel. Any other error: that is not known. No lock is held. Nil: there is no control
	// plane.
	Confirm func(topic, channel string, created uint64) error
	// Changed is called after topics or channels have come or gone, with no
	// lock held, by any goroutine. It must not block. Nil: it is not wanted.
	Changed func()
	// EndToEnd is how far back the latencies from arrival to FIN are kept; 0:
	// they are not measured.
	EndToEnd time.Duration
	// Storage takes what does not fit into memory; nil: nothing does.
	Storage *Storage
	// DeadLetter publishes a message to a topic that this broker does not carry, and returns
	// when the message is accepted. Nil: dead letters stay in their channel until the broker
	// carries the topic.
	DeadLetter func(ctx context.Context, topic string, body []byte) error
	// Log says which dead letters cannot be stored; nil: it is not said.
	Log *slog.Logger
	// Trace records every release; nil: they are not recorded.
	Trace *Trace
	// Seed of the draws for sampling subscribers.
	Seed uint64
	// Now reads the clock; nil means clock.Mono.
	Now func() mono.Time
}

// Validate reports all problems at once.
func (c Config) Validate() error {
	var errs faults.List
	errs.If(c.Capacity < 1, "--mem-queue-size %d is less than 1 message", c.Capacity)
	errs.If(c.MaxMemory < 0, "--max-memory-bytes %d is negative", c.MaxMemory)
	errs.If(c.MaxMsgTimeout <= 0, "--max-msg-timeout %v is not positive", c.MaxMsgTimeout)
	errs.If(c.RejectAfter < 0, "--reject-after %v is negative", c.RejectAfter)
	errs.If(c.MaxBackdating < 0 || c.MaxBackdating > tokenbucket.Horizon, "--max-backdating %v is outside [0, %v]", c.MaxBackdating, tokenbucket.Horizon)
	errs.If(c.MaxChannelConsumers < 0, "--max-channel-consumers %d is negative", c.MaxChannelConsumers)
	errs.If(c.MaxTopics < 0 || c.MaxTopicChannels < 0 || c.MaxChannels < 0, "--max-topics %d, --max-topic-channels %d and --max-channels %d: none may be negative", c.MaxTopics, c.MaxTopicChannels, c.MaxChannels)
	errs.If(c.EndToEnd < 0, "--e2e-processing-latency-window-time %v is negative", c.EndToEnd)
	return errs.Err()
}

// Broker is the table of topics.
type Broker struct {
	*shared
	closing chan struct{} // closed by Close

	reported []*Topic // by the last report. Owned by Report's one caller

	mu struct {
		sync.RWMutex
		topics map[string]*Topic
		asked  map[string]chan struct{} // about to be created; closed then
		closed bool
	}
}

// New returns a broker without topics.
func New(cfg Config) (*Broker, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	b := &Broker{shared: newShared(cfg), closing: make(chan struct{})}
	b.fenced = b.yield
	b.letters = newDeadLetters(&b.workers, cfg.Log, b.publishDeadLetter)
	if cfg.Storage != nil {
		b.metadataWriter = newMetadataWriter(cfg.Storage.cfg, &b.workers, b.metadata)
	}
	b.mu.topics = make(map[string]*Topic)
	b.mu.asked = make(map[string]chan struct{})
	return b, nil
}

// Memory returns how many bytes the messages in memory take, and how many they
// may; 0: there is no bound.
func (b *Broker) Memory() (held, most int64) { return b.held.Load(), b.cfg.MaxMemory }

// Now is the broker's clock, for the callers' arrival times.
func (b *Broker) Now() mono.Time { return b.now() }

// Topic returns the topic of that name, or ErrUnknownTopic. It does not
// allocate.
func (b *Broker) Topic(name []byte) (*Topic, error) {
	b.mu.RLock()
	t := b.mu.topics[string(name)]
	b.mu.RUnlock()
	if t == nil {
		return nil, ErrUnknownTopic
	}
	return t, nil
}

// TopicForClient is Topic for a PUB or SUB: it creates the topic if that is
// allowed here. Errors: ErrUnknownTopic, ErrBadName, ErrDraining, ErrTooManyTopics.
func (b *Broker) TopicForClient(name []byte) (*Topic, error) {
	t, err := b.Topic(name)
	if err != nil && b.cfg.AutoCreate {
		return b.CreateTopic(string(name))
	}
	return t, err
}

// CreateTopic returns the topic, creating it if need be.
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
		if asked != nil { // by another: a thousand clients may come at once
			<-asked
			continue
		}
		var channels []string
		if b.cfg.Channels != nil {
			channels = b.cfg.Channels(name)
		}
		t, err = b.createTopic(name, channels)
		if t != nil {
			b.changed()
		}
		return t, err
	}
}

// OrderTopic is CreateTopic that returns when the topic outlives a crash.
// Errors: those of CreateTopic, and ErrStorage: then the topic that it has created is gone,
// unless it is in use by now.
func (b *Broker) OrderTopic(name string) (*Topic, error) {
	_, unknown := b.Topic([]byte(name))
	t, err := b.CreateTopic(name)
	if err != nil {
		return nil, err
	}
	if err := b.Recorded(); err != nil {
		if unknown != nil {
			b.undo(t)
		}
		return nil, fmt.Errorf("topic %q: %w", name, err)
	}
	return t, nil
}

// undo removes a topic that could not be recorded, unless it is in use by now.
func (b *Broker) undo(t *Topic) {
	t.storing.Lock()
	unused := b.forget(t, func() bool { return t.unusedLocked() && len(t.mu.consumers) == 0 })
	t.storing.Unlock()
	if unused {
		t.close(true)
		b.changed()
	}
}

func (b *Broker) newTopic(name string) *Topic { return newTopic(b.shared, name, b.forget, b.has) }

// askFor returns the topic, or a channel that is closed when another caller has
// created it or failed to, or neither: then the caller is to call createTopic.
func (b *Broker) askFor(name string) (t *Topic, asked <-chan struct{}, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if t := b.mu.topics[name]; t != nil {
		return t, nil, nil
	}
	if b.mu.closed || b.draining.Load() {
		return nil, nil, ErrDraining
	}
	if asked := b.mu.asked[name]; asked != nil {
		return nil, asked, nil
	}
	if most := b.cfg.MaxTopics; most > 0 && len(b.mu.topics)+len(b.mu.asked) >= most {
		b.refused.topics.Add(1)
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
	if b.mu.closed || b.draining.Load() {
		return nil, ErrDraining
	}
	t := b.newTopic(name)
	s := t.begin() // no other goroutine has it yet
	for _, c := range channels {
		if wire.ValidChannelName(c) {
			_, _ = t.channel(b.now(), c, s, false) // one too many comes with its first subscriber, or not
		}
	}
	s.listed = false // the caller says so, without b.mu
	t.end(s)
	b.mu.topics[name] = t
	return t, nil
}

// Refused returns how many topics and channels were not created, since there were
// as many as there may be.
func (b *Broker) Refused() (topics, channels uint64) {
	return b.refused.topics.Load(), b.refused.channels.Load()
}

// DeleteTopic removes a topic with all it holds and ends its subscriptions. It returns
// when neither its record nor its log is on the disk any more.
// Errors: ErrUnknownTopic; ErrAway, since it would be back; ErrDraining once the broker is
// closed, since its topics are being left to the next process; ErrStorage: then nothing has
// changed, or the topic is gone until the next start.
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
		case b.mu.topics[name] != t: // another caller deletes it
			return ErrUnknownTopic
		case t.isAway():
			return ErrAway
		}
		delete(b.mu.topics, name)
		t.stop() // before there can be another of its name, with a bucket of its own
		return nil
	})
	if err != nil {
		return err
	}
	t.close(true)
	b.listed()
	if t.store == nil {
		return nil
	}
	<-t.store.gone // or it would be back after a crash
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.store.unremoved; err != nil {
		return fmt.Errorf("%w: the log of topic %q is not removed: %w", ErrStorage, name, err)
	}
	return nil
}

// unrecord removes the record of a topic, and then the topic by remove. After an error the
// record is as it was.
func (b *Broker) unrecord(t *Topic, remove func() error) error {
	if t.isAway() {
		return ErrAway
	}
	none := edit(func(*metadata.Topic) bool { return false })
	err := t.record(&none)
	if err == nil {
		err = remove()
	}
	t.mu.Lock()
	differs := t.forgetEdit(&none, err == nil)
	t.mu.Unlock()
	if differs {
		b.recorded()
	}
	return err
}

// DeleteUnused is DeleteTopic of a topic that holds no message, and that is retired or that no
// connection publishes to; any other stays as it is. What is published meanwhile
// is either held, so that the topic stays, or not accepted.
// Errors: ErrUnknownTopic, ErrInUse, ErrStorage.
func (b *Broker) DeleteUnused(name string) error {
	t, err := b.Topic([]byte(name))
	if err != nil {
		return err
	}
	inUse := fmt.Errorf("topic %q: %w", name, ErrInUse)
	t.mu.Lock()
	unused := t.unusedLocked()
	t.mu.Unlock()
	if !unused {
		return inUse
	}
	err = b.unrecord(t, func() error {
		t.storing.Lock() // else a message could be on its way to the disk
		defer t.storing.Unlock()
		if !b.forget(t, t.unusedLocked) {
			return inUse
		}
		return nil
	})
	if err != nil {
		return err
	}
	t.close(true)
	b.listed()
	return nil
}

// unusedLocked reports whether the topic holds no message, and is retired or no connection
// publishes to it.
// Requires: mu held.
func (t *Topic) unusedLocked() bool {
	held, _ := t.heldLocked(0)
	return held == 0 && (t.publishers == 0 || t.mu.retired) && !t.awayLocked()
}

// forget removes t from the table and closes it for good if unneeded says so, in one step, so
// that it is not found there any more, and cannot be subscribed to by one who has it already. It
// reports whether it did; then the caller calls close. unneeded is called with t.mu held.
func (b *Broker) forget(t *Topic, unneeded func() bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	if b.mu.closed || b.mu.topics[t.name] != t || t.mu.closed || !unneeded() {
		return false
	}
	t.mu.closed = true
	delete(b.mu.topics, t.name)
	return true
}

// has reports whether the topic is the one of its name.
func (b *Broker) has(t *Topic) bool {
	now, _ := b.Topic([]byte(t.name))
	return now == t
}

// Topics returns the topics by name.
func (b *Broker) Topics() []*Topic {
	b.mu.RLock()
	topics := make([]*Topic, 0, len(b.mu.topics))
	for _, t := range b.mu.topics {
		topics = append(topics, t)
	}
	b.mu.RUnlock()
	slices.SortFunc(topics, func(a, b *Topic) int { return cmp.Compare(a.name, b.name) })
	return topics
}

// Drain refuses what is published from now on, has all that topics hold stored, and
// waits until every message that a subscriber could get before ctx ends has been
// finished, or ctx ends. It returns the number of messages still held. They, too, outlive
// a process that is killed meanwhile, once the disk has taken them.
func (b *Broker) Drain(ctx context.Context) (left int) {
	b.draining.Store(true)
	end := mono.Never
	if at, ok := ctx.Deadline(); ok {
		end = b.now().Add(time.Until(at))
	}
	for _, t := range b.Topics() {
		t.keep()
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		held, moving := 0, false
		for _, t := range b.Topics() {
			h, m := t.held(end)
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

// Close ends every subscription and waits for the broker's goroutines. With a
// Storage, every message still held is then on disk, and every topic and channel
// recorded; the error names the lines for which that failed.
func (b *Broker) Close() error {
	b.draining.Store(true)
	b.batches.Lock() // from now on none begins
	b.mu.Lock()
	closed := b.mu.closed
	b.mu.closed = true
	b.mu.Unlock()
	b.batches.Unlock()
	if closed {
		return nil
	}
	close(b.closing)
	b.letters.end()
	for _, t := range b.Topics() {
		t.close(false)
	}
	if b.metadataWriter != nil {
		b.metadataWriter.end()
	}
	b.workers.Wait()
	if b.cfg.Storage == nil {
		return nil
	}
	stores := b.stores()
	_ = inParallel(stores, (*store).makeRoom) // what fails because of it says so
	_ = inParallel(stores, (*store).leave)
	recorded := b.metadataWriter.write()
	if recorded != nil { // a mark that stays would be taken for a log that was deleted
		for _, st := range stores {
			st.spent = false
		}
	}
	var stored atomic.Int64
	var teller sync.WaitGroup
	defer teller.Wait()
	done := make(chan struct{})
	defer close(done)
	teller.Go(func() { tellProgress(b.cfg.Storage.cfg.Log, &stored, len(stores), done) })
	unstored := inParallel(stores, func(st *store) error {
		defer stored.Add(1)
		return st.persist()
	})
	return errors.Join(recorded, unstored, b.metadataWriter.finish())
}

// stores returns those of the topics that have one.
func (b *Broker) stores() (all []*store) {
	for _, t := range b.Topics() {
		if t.store != nil {
			all = append(all, t.store)
		}
	}
	return all
}

// writers is how many topics are written at a time: fsyncs of several files cost a
// disk little more than that of one.
const writers = 16

// inParallel does something with each store and returns what went wrong.
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
