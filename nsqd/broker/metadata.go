package broker

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// metadataWriter writes the metadata file of a broker with a Storage. It writes in the
// background after a change, once for all changes in the meantime. A goroutine runs only
// while there is something to write.
type metadataWriter struct {
	// Set once.
	path    string
	log     *slog.Logger
	state   func() metadata.State // current state
	workers *sync.WaitGroup
	stop    chan struct{} // closed by end
	hurry   chan struct{} // 1 deep: a caller waits for the next attempt

	mu struct {
		sync.Mutex
		wanted  uint64 // number of changes
		saved   uint64 // number of changes in the file
		tried   uint64 // number of changes in the last attempt
		begun   bool   // the state of an earlier process is restored
		running bool
		failing error // error of the last attempt
		ended   bool  // no new goroutine starts
	}
	turn sync.Cond // on mu: an attempt has ended, or no further attempt will follow
}

// metadataRetry is the wait after a failed attempt.
const metadataRetry = 500 * time.Millisecond

func newMetadataWriter(cfg StorageConfig, workers *sync.WaitGroup, state func() metadata.State) *metadataWriter {
	k := &metadataWriter{path: cfg.Metadata, log: cfg.Log, state: state, workers: workers, stop: make(chan struct{}), hurry: make(chan struct{}, 1)}
	k.turn.L = &k.mu
	return k
}

// begin permits writes, after the broker has restored the contents of the file.
func (k *metadataWriter) begin() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.begun = true
	k.start()
}

// changed marks the file as out of date. It does not block.
func (k *metadataWriter) changed() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.wanted++
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
		err := k.write()
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

// write writes all changes before the call. Only one goroutine may call write at a time.
func (k *metadataWriter) write() error {
	k.mu.Lock()
	upTo, begun := k.mu.wanted, k.mu.begun
	k.mu.Unlock()
	if !begun {
		return nil // the file has a state that this broker has not restored
	}
	err := metadata.Write(k.path, k.state())
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
	if done {
		return nil
	}
	return k.write()
}

// wait returns nil after all changes before the call are in the file. It returns the error
// of an attempt that began after the call. Before the restoration, wait returns
// immediately. It returns ErrDraining if no attempt will follow.
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
	return m, t.orders.edited(&m) && !wire.Ephemeral(t.runner.name) && !(t.runner.awayLocked() && t.store.unrecorded)
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
