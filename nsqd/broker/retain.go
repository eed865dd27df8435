package broker

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// A topic's log keeps what its channels are done with for as long as its retention says,
// and a seek brings a channel back to it. What is not done is kept without that.

// trimInterval is how often a log is looked at for what has become too old, while nothing
// else happens to the topic.
const trimInterval = time.Minute

// ErrSeek: the place to seek to is none.
var ErrSeek = errors.New("neither begin, end, a time, nor an offset up to the topic's end")

// Retain sets the topic's own retention; nil: that of the broker. What is retained already
// is judged by it, too. Errors: queue.ErrNoCursor without a log; ErrStorage.
func (t *Topic) Retain(r *metadata.Retention) error {
	if t.store == nil {
		return queue.ErrNoCursor
	}
	return t.ordered(func(m *metadata.Topic) bool {
		m.Retain = r
		return true
	}, func(mono.Time, *step) error {
		t.store.retainLocked(r)
		return nil
	})
}

func (st *store) setRetention(own *metadata.Retention) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.retainLocked(own)
}

// retainLocked requires mu held.
func (st *store) retainLocked(own *metadata.Retention) {
	st.retain = own
	retain := st.retention()
	st.mu.core.SetRetained(retain != (commitlog.Retain{}))
	if log := st.log.Load(); log != nil {
		log.SetRetain(retain)
		st.retained(log)
	}
}

// retention is what is in force. Requires: mu held.
func (st *store) retention() commitlog.Retain {
	r := st.storage().cfg.Retain
	if st.retain != nil {
		r = *st.retain
	}
	return commitlog.Retain{Age: r.Age, Bytes: r.Bytes}
}

func (st *store) retains() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.retention() != (commitlog.Retain{})
}

// retained says what a seek may find in the log. Requires: mu held.
func (st *store) retained(log *openLog) {
	first := queue.Offset(math.MaxUint64)
	if st.retention() != (commitlog.Retain{}) {
		first = queue.Offset(log.Need(math.MaxUint64))
	}
	st.mu.core.Retained(first)
}

// opened is for a log that ensure has made.
func (st *store) opened(log *openLog) {
	st.mu.Lock()
	log.SetRetain(st.retention())
	st.retained(log)
	st.mu.Unlock()
	st.log.Store(log)
}

// trimOld lets logs go of what has become too old, until the broker is closed.
func (b *Broker) trimOld() {
	tick := time.NewTicker(trimInterval)
	defer tick.Stop()
	for {
		select {
		case <-b.closing:
			return
		case <-tick.C:
		}
		for _, st := range b.stores() {
			select {
			case <-b.closing: // streams that do not answer take their time
				return
			default:
				st.trimOld()
			}
		}
	}
}

func (st *store) trimOld() {
	st.saving.Lock()
	defer st.saving.Unlock()
	if log := st.log.Load(); log != nil {
		if err := log.Trim(0); err != nil && !errors.Is(err, commitlog.ErrClosed) {
			st.report("log on disk not trimmed; trying again", err)
		}
	}
}

// Place is where a channel is to go on: To, unless Begin, End or Time is set.
type Place struct {
	Begin, End bool
	Time       mono.Wall // of publication; 0: not by time
	Offset     uint64
}

// Seek moves a channel's cursor, as queue.Topic.Seek says, and returns the offset from which
// on it now gets messages: that of the place, or the oldest that is retained if it is not.
// It is on disk then.
// Errors: ErrUnknownChannel, ErrDraining, ErrSeek, queue.ErrNoCursor, ErrStorage; that of the disk.
func (t *Topic) Seek(channel string, to Place) (uint64, error) {
	st := t.store
	if st == nil {
		return 0, queue.ErrNoCursor
	}
	if err := t.movable(channel); err != nil {
		return 0, err
	}
	st.saving.Lock()
	at, err := st.seek(channel, to)
	st.saving.Unlock()
	if err == nil {
		err = st.settled()
	}
	return uint64(at), err
}

// seek requires saving held: nothing is trimmed meanwhile.
func (st *store) seek(channel string, to Place) (at queue.Offset, err error) {
	log := st.log.Load()
	at = queue.Offset(to.Offset)
	logged := false // a message of that time is in the log
	switch {
	case to.Begin:
		at = 0
	case to.End:
		at = math.MaxUint64
	case to.Time != 0 && log != nil:
		var found commitlog.Offset
		if found, err = log.At(to.Time); err != nil {
			return 0, err
		}
		at, logged = queue.Offset(found), found < log.Stats().Next
	}
	seekErr := st.onChannel(channel, func(now mono.Time, c *queue.Channel, s *step) {
		core := st.mu.core
		first, records := core.InLog(), 0
		switch {
		case wire.Ephemeral(channel): // before the log is told what is needed
			err = queue.ErrNoCursor
			return
		case to.Time != 0 && !logged:
			at = core.At(to.Time) // it is in memory, or yet to come
		case !to.Begin && !to.End && at > core.End():
			err = fmt.Errorf("offset %d, the topic ends at %d: %w", at, core.End(), ErrSeek)
			return
		}
		at = min(at, core.Front())
		if log != nil {
			if first = min(first, queue.Offset(log.Need(commitlog.Offset(at)))); at < core.InLog() {
				at = max(at, first)
				records = int(log.Records(commitlog.Offset(at)))
			}
		} else {
			at = max(at, first)
		}
		if err = core.Seek(now, c, at, records, &s.fx); err == nil && log != nil {
			st.disk.used = true // all was done before, perhaps, and nothing to be saved
		}
	})
	return at, errors.Join(seekErr, err)
}

// errCarrying: an older snapshot needs messages where they were before they were carried forward.
var errCarrying = errors.New("messages that are carried forward are not on disk yet")

// settle stores the topic's cursors and reports whether there was anything to store; with
// anyway it stores them even if that is done.
func (st *store) settle(anyway bool) (tried bool, err error) {
	st.saving.Lock()
	defer st.saving.Unlock()
	log := st.log.Load()
	st.mu.Lock()
	switch {
	case log == nil, st.remove, !anyway && !st.unsaved():
		st.mu.Unlock()
		return false, nil
	case st.mu.core.Carrying(): // the store tries again
		st.mu.Unlock()
		return true, errCarrying
	}
	snapshot := st.snapshot(nil)
	st.mu.Unlock()
	return true, log.SaveCursors(snapshot)
}
