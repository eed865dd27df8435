package broker

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// A topic's log keeps finished messages according to the topic's retention, and a seek
// moves a channel back to them. Unfinished messages are kept in any case.

// trimInterval is the interval at which an otherwise idle log is trimmed by age.
const trimInterval = time.Minute

// ErrSeek: the place of a seek is invalid.
var ErrSeek = errors.New("not begin, end, a time, or an offset up to the topic's end")

// Retain sets the topic's own retention; nil: the broker's retention. The retention also
// applies to messages that are already retained. Errors: queue.ErrNoCursor without a log;
// ErrStorage.
func (t *Topic) Retain(r *metadata.Retention) error {
	if t.store == nil {
		return queue.ErrNoCursor
	}
	return t.orders.ordered(func(m *metadata.Topic) bool {
		m.Retain = r
		return true
	}, func(mono.Time, *step) error {
		t.store.retainLocked(r)
		return nil
	})
}

func (st *store) setRetention(own *metadata.Retention) {
	st.runner.mu.Lock()
	defer st.runner.mu.Unlock()
	st.retainLocked(own)
}

// retainLocked sets the retention. Requires: mu held.
func (st *store) retainLocked(own *metadata.Retention) {
	st.retain = own
	retain := st.retention()
	st.runner.mu.core.Log().SetRetained(retain != (commitlog.Retain{}))
	if log := st.log.Load(); log != nil {
		log.SetRetain(retain)
		st.retained(log)
	}
}

// retention returns the effective retention. Requires: mu held.
func (st *store) retention() commitlog.Retain {
	r := st.storage().cfg.Retain
	if st.retain != nil {
		r = *st.retain
	}
	return commitlog.Retain{Age: r.Age, Bytes: r.Bytes}
}

func (st *store) retains() bool {
	st.runner.mu.Lock()
	defer st.runner.mu.Unlock()
	return st.retention() != (commitlog.Retain{})
}

// retained updates the first offset that a seek may find in the log. Requires: mu held.
func (st *store) retained(log *openLog) {
	first := queue.Offset(math.MaxUint64)
	if st.retention() != (commitlog.Retain{}) {
		first = queue.Offset(log.Need(math.MaxUint64))
	}
	st.runner.mu.core.Log().SetFirst(first)
}

// trimOld trims logs by age, until the broker is closed.
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
			case <-b.closing: // unavailable streams take time
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
			st.report("cannot delete old messages from the log; retrying", err)
		}
	}
}

// Place is the target of a seek: Offset, unless Begin, End or Time is set.
type Place struct {
	Begin, End bool
	Time       mono.Wall // publication time; 0: not by time
	Offset     uint64
}

// Seek moves a channel's cursor, as queue.Topic.Seek documents, and returns the offset of
// the next message: the offset of the place or, if the place is no longer retained, the
// oldest retained offset. Seek returns after the cursor is on disk.
// Errors: ErrUnknownChannel, ErrDraining, ErrSeek, queue.ErrNoCursor, ErrStorage; errors of
// the disk.
func (t *Topic) Seek(channel string, to Place) (uint64, error) {
	st := t.store
	if st == nil {
		return 0, queue.ErrNoCursor
	}
	if err := t.movable(channel); err != nil {
		return 0, err
	}
	st.saving.Lock()
	offset, err := st.seek(channel, to)
	st.saving.Unlock()
	if err == nil {
		err = st.settled()
	}
	return uint64(offset), err
}

// seek moves the cursor. Requires: saving held, so that nothing is trimmed.
func (st *store) seek(channel string, to Place) (target queue.Offset, err error) {
	log := st.log.Load()
	target = queue.Offset(to.Offset)
	logged := false // the log has a message of the requested time
	switch {
	case to.Begin:
		target = 0
	case to.End:
		target = math.MaxUint64
	case to.Time != 0 && log != nil:
		var found commitlog.Offset
		if found, err = log.At(to.Time); err != nil {
			return 0, err
		}
		target, logged = queue.Offset(found), found < log.Stats().Next
	}
	seekErr := st.runner.onChannel(channel, func(now mono.Time, c *queue.Channel, s *step) {
		core := st.runner.mu.core
		first, records := core.Log().StoredTo(), 0
		switch {
		case wire.Ephemeral(channel): // before log.Need records what is needed
			err = queue.ErrNoCursor
			return
		case to.Time != 0 && !logged:
			target = core.Cursors().At(to.Time) // in memory, or in the future
		case !to.Begin && !to.End && target > core.Log().End():
			err = fmt.Errorf("offset %d, the topic ends at %d: %w", target, core.Log().End(), ErrSeek)
			return
		}
		target = min(target, core.Log().Front())
		if log != nil {
			if first = min(first, queue.Offset(log.Need(commitlog.Offset(target)))); target < core.Log().StoredTo() {
				target = max(target, first)
				records = int(log.Records(commitlog.Offset(target)))
			}
		} else {
			target = max(target, first)
		}
		if err = core.Seek(now, c, target, records, &s.fx); err == nil && log != nil {
			st.runner.disk.used = true // if all was finished before, there may have been nothing to save
		}
	})
	return target, errors.Join(seekErr, err)
}

// errCarrying: messages are being carried forward, and an older snapshot still needs their
// old positions.
var errCarrying = errors.New("messages carried forward are not on disk yet; retry")

// settle saves the topic's cursors, and reports whether there was anything to save. With
// anyway it saves even unchanged cursors.
func (st *store) settle(anyway bool) (tried bool, err error) {
	st.saving.Lock()
	defer st.saving.Unlock()
	log := st.log.Load()
	st.runner.mu.Lock()
	switch {
	case log == nil, st.remove, !anyway && !st.runner.unsaved():
		st.runner.mu.Unlock()
		return false, nil
	case st.runner.mu.core.Log().Carrying(): // the store retries
		st.runner.mu.Unlock()
		return true, errCarrying
	}
	snapshot := st.snapshot(nil)
	st.runner.mu.Unlock()
	return true, log.SaveCursors(snapshot)
}

// Peeked is a copy of a message.
type Peeked struct {
	ID        wire.MessageID
	Offset    uint64    // in the topic's log
	Timestamp mono.Wall // publication time
	Attempts  uint16    // deliveries so far
	Body      []byte
}

// Bounds of Peek. The first message may exceed MaxPeekBytes. peekReads bounds the reads of
// the log.
const (
	MaxPeek      = 1000    // messages
	MaxPeekBytes = 1 << 20 // bytes of bodies
	peekReads    = 100
)

// Peek returns copies of the messages that the channel would deliver next, in order,
// without removing any. The copies are consistent at one moment. They include released
// messages that no consumer has, in memory and on disk, but no in-flight or deferred
// messages. count is at least 1; Peek returns at most MaxPeek messages.
// Errors: ErrUnknownChannel; errors of the disk.
func (t *Topic) Peek(channel string, count int) ([]Peeked, error) {
	if t.store != nil { // keeps the messages that are on disk at this moment
		t.store.saving.Lock()
		defer t.store.saving.Unlock()
	}
	peeked, last := peeking{count: min(count, MaxPeek)}, peeking{count: min(count, MaxPeek)}
	t.runner.mu.Lock()
	c := t.runner.mu.core.Channel(channel)
	if c == nil {
		t.runner.mu.Unlock()
		return nil, fmt.Errorf("channel %q: %w", channel, ErrUnknownChannel)
	}
	unread := c.Peek(t.runner.shared.now(), peeked.count, peeked.message, last.message)
	t.runner.mu.Unlock()

	if err := t.store.peek(&unread, &peeked); err != nil {
		return peeked.all, err
	}
	for _, m := range last.all {
		peeked.add(m)
	}
	return peeked.all, nil
}

// peeking collects the result of Peek.
type peeking struct {
	all         []Peeked
	count, size int
}

func (p *peeking) full() bool { return len(p.all) >= p.count }

func (p *peeking) add(m Peeked) {
	if p.size += len(m.Body); p.size > MaxPeekBytes && len(p.all) > 0 {
		p.count = 0 // no more
	}
	if !p.full() {
		m.Body = slices.Clone(m.Body)
		p.all = append(p.all, m)
	}
}

func (p *peeking) message(m *queue.Message, attempts uint16) {
	p.add(Peeked{m.ID, uint64(m.Offset), m.Timestamp, attempts, m.Body})
}

func (p *peeking) record(r *commitlog.Record, attempts uint16) {
	p.add(Peeked{r.ID, uint64(r.Offset), r.Timestamp, attempts, r.Body})
}

// peek reads the unread messages from the log, if there is a store. Requires: saving held.
func (st *store) peek(u *queue.Unread, p *peeking) error {
	if st == nil {
		return nil
	}
	log := st.log.Load()
	if log == nil {
		return nil
	}
	var batch commitlog.Batch
	for i, o := range u.Single {
		if p.full() {
			return nil
		}
		if err := log.Read(commitlog.Offset(o), commitlog.Limit{Records: 1, Bytes: 1}, &batch); err != nil {
			return err
		}
		if rs := batch.Records; len(rs) > 0 && queue.Offset(rs[0].Offset) == o {
			p.record(&rs[0], max(u.Attempts[i], rs[0].Attempts))
		}
	}
	for offset, n := commitlog.Offset(u.From), 0; offset < commitlog.Offset(u.To) && !p.full() && n < peekReads; n++ {
		if err := log.Read(offset, commitlog.Limit{Records: p.count, Bytes: MaxPeekBytes}, &batch); err != nil {
			return err
		}
		for i := range batch.Records {
			if r := &batch.Records[i]; u.Takes(queue.Offset(r.Offset), string(r.Channel)) {
				p.record(r, r.Attempts)
			}
		}
		if batch.Next == offset {
			return nil
		}
		offset = batch.Next
	}
	return nil
}
