package broker

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// metadataWriter writes the metadata file of a broker with a Storage. It writes in the
// background after a change, once for all changes in the meantime. A goroutine runs only
// while there is something to write.
type metadataWriter struct {
	// Set once.
	path    string
	log     *slog.Logger
	state   func() metadata.State             // current state
	topic   func(name string) metadata.Change // current record of a topic
	workers *sync.WaitGroup
	stop    chan struct{} // closed by end
	hurry   chan struct{} // 1 deep: a caller waits for the next attempt

	file *metadata.File // owned by the caller of write

	mu struct {
		sync.Mutex
		topics  map[string]struct{} // changed since the last write
		wanted  uint64              // number of changes
		saved   uint64              // number of changes in the file
		tried   uint64              // number of changes in the last attempt
		begun   bool                // the state of an earlier process is restored
		running bool
		failing error // error of the last attempt
		ended   bool  // no new goroutine starts
	}
	turn sync.Cond // on mu: an attempt has ended, or no further attempt will follow
}

// metadataRetry is the wait after a failed attempt.
const metadataRetry = 500 * time.Millisecond

func newMetadataWriter(cfg StorageConfig, workers *sync.WaitGroup, state func() metadata.State, topic func(string) metadata.Change) *metadataWriter {
	k := &metadataWriter{path: cfg.Metadata, file: metadata.NewFile(cfg.Metadata), log: cfg.Log, state: state, topic: topic, workers: workers, stop: make(chan struct{}), hurry: make(chan struct{}, 1)}
	k.turn.L = &k.mu
	k.mu.topics = map[string]struct{}{}
	return k
}

// begin permits writes, after the broker has restored the contents of the file.
func (k *metadataWriter) begin() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.begun = true
	k.start()
}

// changed marks the record of a topic as out of date. It does not block.
func (k *metadataWriter) changed(topic string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.wanted++
	k.mu.topics[topic] = struct{}{}
	k.start()
}

// start starts run if there are changes to write and run is not running. Requires: mu held.
func (k *metadataWriter) start() {
	if k.mu.begun && !k.mu.ended && !k.mu.running && k.mu.saved < k.mu.wanted {
		k.mu.running = true
		k.workers.Go(k.run)
	}
}

func (k *metadataWriter) run() {
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for {
		failed := k.fault() != nil
		err := k.write(false)
		first := err != nil && !failed
		k.mu.Lock()
		more := err != nil || k.mu.saved < k.mu.wanted
		if !more || k.mu.ended {
			k.mu.running = false
			more = false
		}
		k.mu.Unlock()
		k.turn.Broadcast()
		if !more {
			return
		}
		if first {
			k.log.Error("cannot write the metadata file; retrying. After a restart, recent changes of topics and channels would be lost", obs.KeyError, err)
		}
		if err != nil {
			retry.Reset(metadataRetry)
			select {
			case <-k.stop: // one last attempt
			case <-retry.C:
			case <-k.hurry:
			}
		}
	}
}

// write writes all changes before the call. If whole is set, write replaces the file. Only one goroutine
// may call write at a time.
func (k *metadataWriter) write(whole bool) error {
	k.mu.Lock()
	upTo, begun, changed := k.mu.wanted, k.mu.begun, k.mu.topics
	if begun {
		k.mu.topics = map[string]struct{}{}
	}
	k.mu.Unlock()
	if !begun {
		return nil // the file has a state that this broker has not restored
	}
	appended := false
	var err error
	if !whole {
		var changes []metadata.Change
		for _, name := range slices.Sorted(maps.Keys(changed)) {
			changes = append(changes, k.topic(name))
		}
		appended, _ = k.file.Append(changes)
	}
	if !appended { // also after an error, as the whole file has a reserve on the disk
		err = k.file.Write(k.state())
	}
	k.mu.Lock()
	k.mu.tried, k.mu.failing = upTo, err
	if err == nil {
		k.mu.saved = upTo
	}
	k.mu.Unlock()
	return err
}

// finish writes the changes since the last write.
// Requires: the broker's workers have ended.
func (k *metadataWriter) finish() error {
	k.mu.Lock()
	done := k.mu.saved >= k.mu.wanted
	k.mu.Unlock()
	if !done {
		if err := k.write(false); err != nil {
			return err
		}
	}
	return k.file.Close(k.state)
}

// wait returns nil after all changes before the call are in the file. It returns the error
// of the last attempt if that attempt had these changes. Before the restoration, wait
// returns immediately. It returns ErrDraining if no attempt will follow.
func (k *metadataWriter) wait() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	upTo := k.mu.wanted
	for k.mu.begun && k.mu.saved < upTo {
		switch {
		case k.mu.tried >= upTo:
			return k.mu.failing
		case !k.mu.running:
			return ErrDraining
		}
		select {
		case k.hurry <- struct{}{}:
		default:
		}
		k.turn.Wait()
	}
	return nil
}

// fault returns the reason why the file is out of date, or nil.
func (k *metadataWriter) fault() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.mu.failing
}

// end prevents new goroutines. After the broker's workers have ended, only the caller of
// write writes.
func (k *metadataWriter) end() {
	k.mu.Lock()
	k.mu.ended = true
	k.mu.Unlock()
	close(k.stop)
}

// metadata returns the state for the next process.
func (b *Broker) metadata() (s metadata.State) {
	for _, t := range b.Topics() {
		if m, record := t.metadata(); record {
			s.Topics = append(s.Topics, m)
		}
	}
	return s
}

// topicRecord returns the record of a topic for the next process.
func (b *Broker) topicRecord(name string) metadata.Change {
	b.mu.RLock()
	t := b.mu.topics[name]
	b.mu.RUnlock()
	if t != nil {
		if m, record := t.metadata(); record {
			return metadata.Change{Topic: &m}
		}
	}
	return metadata.Change{Removed: name}
}

func (t *Topic) metadata() (m metadata.Topic, record bool) {
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	m = metadata.Topic{Name: t.runner.name, Paused: t.runner.mu.core.Paused(), Contract: t.terms.contract, Identity: t.channels.identity}
	m.Expiry, m.Expiries = t.runner.mu.expiry.recorded()
	if t.store != nil {
		m.Retain, m.Logged = t.store.retain, t.store.logged.Load()
	}
	for _, c := range t.runner.mu.core.Channels() {
		if !wire.Ephemeral(c.Name()) {
			m.Channels = append(m.Channels, metadata.Channel{Name: c.Name(), Paused: c.Paused(), Created: t.channels.memberships[c.Name()].created})
		}
	}
	return m, t.orders.edited(&m) && !wire.Ephemeral(t.runner.name) && !(t.runner.unavailableLocked() && t.store.unrecorded)
}

// restoreMetadata creates the topics and channels of the file, without messages.
func (b *Broker) restoreMetadata() error {
	if b.shared.metadataWriter == nil {
		return nil
	}
	s, err := metadata.Read(b.shared.metadataWriter.path)
	if err != nil {
		return fmt.Errorf("restore topics and channels: %w", err)
	}
	for _, m := range s.Topics {
		t := b.restoreTopic(m.Name)
		t.channels.identify(m.Identity)
		if t.store != nil {
			t.store.setRetention(m.Retain)
			t.store.logged.Store(m.Logged)
		}
		t.expiry.restoreExpiry(m.Expiry, m.Expiries)
		if m.Paused {
			if err := t.Pause(); err != nil {
				return fmt.Errorf("restore topic %s: %w", m.Name, err)
			}
		}
		if m.Contract != nil && b.shared.cfg.AutoCreate { // in a cluster the control plane sets contracts
			t.terms.restoreContract(m.Contract)
		}
		for _, c := range m.Channels {
			if err := t.channels.createChannel(c.Name, true); err != nil {
				return fmt.Errorf("restore channel %s of topic %s: %w", c.Name, m.Name, err)
			}
			t.channels.restoreMembership(c.Name, c.Created)
			if c.Paused {
				if err := t.PauseChannel(c.Name); err != nil {
					return fmt.Errorf("restore channel %s of topic %s: %w", c.Name, m.Name, err)
				}
			}
		}
	}
	return nil
}

// An order changes the record of a topic, apart from its messages. The order is first
// written to the metadata file, and then takes effect. So a crash undoes no acknowledged
// order, and an order that cannot be stored changes nothing. The rejected design applies an
// order first and undoes it if it cannot be stored. But a deletion cannot be undone, and
// neither can releases after the end of a pause.

// edit changes the record of a topic. It returns false if the topic must not be recorded.
type edit func(*metadata.Topic) (keep bool)

// orders are a topic's orders that are being stored.
type orders struct {
	runner *runner // set once

	edits []*edit // guarded by runner.mu
}

// edited applies the pending orders to the topic's record.
// Requires: runner.mu held.
func (o *orders) edited(m *metadata.Topic) (keep bool) {
	for _, e := range o.edits {
		if !(*e)(m) {
			return false
		}
	}
	return true
}

// record writes the result of an order to the metadata file. Afterwards, also after an
// error, the caller must call forgetEdit. After an error the caller must then call recant.
// Error: ErrStorage; the caller must not execute the order.
func (o *orders) record(e *edit) error {
	o.runner.mu.Lock()
	o.edits = append(o.edits, e)
	o.runner.mu.Unlock()
	o.runner.shared.recorded(o.runner.name)
	return o.runner.shared.Recorded()
}

// recant returns after the last attempt that may have written an order that record refused.
// The writer retries at once, so the order could be in the file although its caller got an
// error, and a crash would carry the order out. If the disk works again, recant returns
// after the file is as it was. Requires: forgetEdit has ended the order, and the topic's
// record is marked as out of date.
func (o *orders) recant() { _ = o.runner.shared.Recorded() }

// forgetEdit ends an order. It reports whether the metadata file may differ from the topic:
// the order was not executed, or other orders are pending, which may take effect in a
// different sequence. Requires: mu held.
func (o *orders) forgetEdit(e *edit, carriedOut bool) (differs bool) {
	o.edits = slices.DeleteFunc(o.edits, func(other *edit) bool { return other == e })
	return !carriedOut || len(o.edits) > 0
}

// ordered stores an order and then executes it with apply, in one step. After an error
// nothing has changed. Errors: ErrStorage; errors of apply.
func (o *orders) ordered(e edit, apply func(now mono.Time, s *step) error) error {
	var err error
	recordable := o.runner.shared.metadataWriter != nil && !wire.Ephemeral(o.runner.name)
	if recordable {
		err = o.record(&e)
	}
	refused := err != nil
	s := o.runner.begin()
	if err == nil {
		err = apply(o.runner.shared.now(), s)
	}
	if recordable {
		differs := o.forgetEdit(&e, err == nil)
		s.stored, s.record = !differs, differs
	}
	o.runner.end(s)
	if refused {
		o.recant()
	}
	return err
}

// orderedChannel is ordered for an existing channel. Errors: ErrUnknownChannel,
// ErrDraining, ErrUnavailable, ErrStorage.
func (o *orders) orderedChannel(name string, e func(c *metadata.Channel) (keep bool), apply channelStep) error {
	if err := o.hasChannel(name); err != nil {
		return err
	}
	if wire.Ephemeral(name) {
		return o.runner.onChannel(name, apply)
	}
	return o.ordered(func(m *metadata.Topic) bool {
		m.Channels = slices.DeleteFunc(slices.Clone(m.Channels), func(c metadata.Channel) bool { return c.Name == name && !e(&c) })
		for i := range m.Channels {
			if m.Channels[i].Name == name {
				e(&m.Channels[i])
			}
		}
		return true
	}, func(now mono.Time, s *step) error { return o.runner.channelStep(now, name, s, apply) })
}

// hasChannel returns an error if no order for the channel can be executed.
func (o *orders) hasChannel(name string) error {
	o.runner.mu.Lock()
	defer o.runner.mu.Unlock()
	_, err := o.runner.orderable(name)
	return err
}

// movable returns an error if an order cannot move the cursor of the channel.
func (t *Topic) movable(channel string) error {
	if err := t.orders.hasChannel(channel); err != nil {
		return err
	}
	return t.store.storable()
}

// Recorded returns after the current topics, channels, pauses and contracts are stored
// durably. Then the caller may acknowledge an order.
// Error: ErrStorage, if the last write of the metadata file with these changes has failed.
func (s *shared) Recorded() error {
	if s.metadataWriter == nil {
		return nil
	}
	if err := s.metadataWriter.wait(); err != nil {
		return fmt.Errorf("%w: %w", ErrStorage, err)
	}
	return nil
}

// storable stores the topic's cursors, and returns an error on failure. An order that moves
// a cursor is executed only if the cursors can be stored. A nil store has nothing to store.
// Error: ErrStorage.
func (st *store) storable() error {
	if st == nil {
		return nil
	}
	_, err := st.settle(true)
	return st.settleResult(err)
}

// settled returns after the finished messages of the topic's channels are recorded durably.
// A nil store has nothing to record. Error: ErrStorage.
func (st *store) settled() error {
	if st == nil {
		return nil
	}
	tried, err := st.settle(false)
	if !tried {
		return nil
	}
	return st.settleResult(err)
}

func (st *store) settleResult(err error) error {
	if errors.Is(err, commitlog.ErrClosed) { // closed with the topic, which stores or removes the cursors
		return nil
	}
	st.recordResult(saving, err) // the store soon saves again, and trims
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStorage, err)
	}
	return nil
}

// Recorded is shared.Recorded.
func (b *Broker) Recorded() error { return b.shared.Recorded() }
