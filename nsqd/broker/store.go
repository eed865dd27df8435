package broker

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/replicated"
)

// store is a topic's way to its log and back: it writes what memory does not hold,
// reads what a cursor is behind with, and saves the cursors. It has a goroutine,
// timers and scratch only while there is something to do.
//
// Acceptance does not wait for it: what is on its way to disk is in memory still,
// bounded by queue.Config.Overflow. When the disk is full the topic fills up behind it
// and refuses, until writing works again; it tries for ever.
//
// Invariants:
//   - with WriteThrough, publishers append under storing; else run alone does, each
//     message at its offset, in order;
//   - cursors are saved at a moment at which all that they say was open is in the log,
//     or in memory alone;
//   - what is deleted from the log is done for all.
type store struct {
	// Set once.
	*runner
	current func() bool // whether the topic is the one of its name
	fenced  func()      // another broker owns what the log has by now
	// roster and restoreRoster are of the topic, and require mu held; nil: the log is not replicated.
	roster        func([]byte) []byte
	restoreRoster func(roster)
	stop          chan struct{} // closed under mu, once
	gone          chan struct{} // closed when the log of a topic that was deleted is removed, or could not be

	// saving orders what reads where the cursors are and acts on it: saving and trimming,
	// and a seek. Taken before storing.
	saving sync.Mutex

	// log is nil until first used; set once, by ensure or Restore.
	log atomic.Pointer[openLog]
	// faults has the bit of each concern that was noted in Storage.health, so that
	// who has nothing to tell need not look there. Who notes a concern writes its
	// bit.
	faults atomic.Uint32
	// logged is metadata.Topic.Logged. Written by ensure, Restore and Close, one at a time.
	logged atomic.Bool

	// Guarded by mu.
	remove    bool                // the topic was deleted: remove the log at the end
	unremoved error               // why the log of a topic that was deleted is there still
	missing   uint64              // places where messages or cursors should have been when the topic was restored
	retain    *metadata.Retention // the topic's own; nil: StorageConfig.Retain
	failing   bool                // the disk does not take messages now
	// unrecorded says that the topic was not recorded by an earlier process: it gets the channels
	// that its log tells of, and is not recorded before it has them.
	unrecorded bool

	// Owned by run; before it starts and after it has ended, by the one who holds
	// the topic.
	scratch *scratch
	carried bool          // something was carried forward since the last snapshot
	empty   bool          // nothing was held when the broker closed
	spent   bool          // then the log is not needed either
	locked  time.Duration // how long mu was held to make that
}

// scratch is what a store needs while it runs.
type scratch struct {
	batch    []*queue.Message
	records  []commitlog.Record
	read     commitlog.Batch
	msgs     []*queue.Message
	snapshot []byte
	carried  []queue.Carried
}

// savePause is how long it takes from a save to the next one. The snapshot was of so many
// bytes, and made under the topic's lock for so long: others have that for saveRatio times
// as long in between, however slow the processor is, up to maxSavePause.
func savePause(snapshot int, locked time.Duration) time.Duration {
	return max(saveInterval, time.Duration(snapshot)*time.Second/savePace, min(saveRatio*locked, maxSavePause))
}

// DefaultReadAhead is for StorageConfig.ReadAhead.
const DefaultReadAhead = 4 << 20

const (
	spillBatch = 256     // messages in one write
	spillBytes = 4 << 20 // of messages in one write, without the last: each is copied on its way
	spillRetry = 250 * time.Millisecond

	// saveInterval is how often it is recorded which messages are done with, at most,
	// and files are deleted; after a crash those since then are delivered again: see
	// savePause.
	saveInterval = 200 * time.Millisecond
	savePace     = 8 << 20 // bytes a second
	saveRatio    = 20
	maxSavePause = 10 * time.Second

	// What keeps more than carryAfter files is carried forward, if it is at most one in
	// carryRatio of the messages since.
	carryAfter = 2
	carryRatio = 100
)

// newStore makes the disk of a runner.
func newStore(r *runner, current func() bool, fenced func()) *store {
	st := &store{runner: r, current: current, fenced: fenced, stop: make(chan struct{}), gone: make(chan struct{})}
	r.disk = &disk{run: st.run, workers: &r.shared.workers, wake: make(chan struct{}, 1)}
	return st
}

// full reports whether nothing more may be published since the log is larger than it may be.
// What was accepted is written to it all the same. A nil store is never full.
func (st *store) full() bool {
	if st == nil || st.storage().cfg.MaxLogBytes == 0 {
		return false
	}
	log, most := st.log.Load(), st.storage().cfg.MaxLogBytes
	return log != nil && log.Size() >= most && log.Needed() >= most
}

// spilling reports whether the topic's messages are being written to disk; not by a nil store.
// Requires: mu held.
func (st *store) spilling() bool { return st != nil && st.disk.running && !st.failing }

// endLocked stops the store; with remove its log is deleted. Requires: mu held.
func (st *store) endLocked(remove bool) {
	d := st.disk
	if d.stopped {
		return
	}
	if remove && st.log.Load() != nil {
		d.start() // if only to remove the log, outside the lock
	}
	d.stopped, st.remove = true, remove
	close(st.stop)
	if remove && !d.running {
		close(st.gone)
	}
}

func (st *store) run() {
	st.scratch = new(scratch)
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	retry.Stop()
	save := time.NewTimer(savePause(0, st.locked))
	defer save.Stop()
	saves := true // the timer is set
	for more := true; more; {
		select {
		case <-st.stop:
			st.conclude()
			return
		case <-st.disk.wake:
		case <-retry.C:
		case <-save.C:
			saves = false
			if err := st.save(); err != nil {
				saves = true
				save.Reset(savePause(0, st.locked))
			}
		}
		for st.turn() {
			select {
			case <-st.stop:
				st.conclude()
				return
			default:
			}
		}
		st.mu.Lock()
		failing := st.failing
		if st.unsaved() && !saves {
			save.Reset(savePause(len(st.scratch.snapshot), st.locked))
			saves = true
		}
		_, want, _ := st.mu.core.Want()
		// Stopped since the last look: it ends above, where the log is removed.
		more = st.disk.stopped || failing || saves || want > 0 || st.mu.core.Unwritten()
		if !more {
			st.scratch = nil
		}
		st.disk.running = more // last: from now on there may be another
		st.mu.Unlock()
		if log := st.log.Load(); !more && log != nil {
			st.do(func(_ mono.Time, s *step) { st.mu.core.ForgetRead(&s.fx) })
			_ = log.Rest() // it is closed, or says so itself
		}
		if failing {
			retry.Reset(spillRetry)
		}
	}
}

// conclude removes the log if that is wanted; otherwise it is left to persist.
func (st *store) conclude() {
	st.mu.Lock()
	remove := st.remove
	st.mu.Unlock()
	if !remove {
		return
	}
	defer close(st.gone)
	if log := st.log.Load(); log != nil {
		if err := log.Remove(); err != nil && !errors.Is(err, commitlog.ErrClosed) {
			st.report("log on disk not removed: after a restart the topic is back", err)
			st.mu.Lock()
			st.unremoved = err
			st.mu.Unlock()
		}
	}
	st.storage().health.forget(st.name)
}

// turn writes one batch and gets one back. It reports whether there may be
// more to do. That nothing can be written does not keep it from reading: it may
// be what makes room.
func (st *store) turn() (more bool) {
	wrote, failed := st.write()
	n, err := st.refill()
	switch {
	case err != nil:
		return st.fault("messages not read from disk; trying again", err)
	case failed != nil:
		return st.fault("messages not written to disk; trying again", failed)
	}
	if st.setFailing(false) {
		st.noted(spilling, nil)
	}
	return wrote || n > 0
}

// setFailing returns what it was before.
func (st *store) setFailing(is bool) (was bool) {
	st.mu.Lock()
	was, st.failing = st.failing, is
	st.mu.Unlock()
	st.room.Broadcast()
	return was
}

// fault logs the first of several failures in a row, and asks for a retry.
func (st *store) fault(what string, err error) (more bool) {
	st.noted(spilling, err)
	if !st.setFailing(true) {
		st.report(what, err)
	}
	return false
}

func (st *store) report(what string, err error) {
	st.storage().log.Error(what, obs.KeyTopic, st.name, obs.KeyError, err)
}

// noted says how the topic's last attempt at something ended.
func (st *store) noted(what concern, err error) {
	if errors.Is(err, replicated.ErrFenced) {
		st.fenced()
	}
	bit := uint32(1) << what
	if err == nil && st.faults.Load()&bit == 0 {
		return
	}
	st.storage().health.note(place{st.name, what}, err)
	if err == nil {
		st.faults.And(^bit)
	} else if first := st.faults.Or(bit)&bit == 0; first && what == publishing { // the store reports the others
		st.report("messages not stored; publishers are refused until they can be", err)
	}
}

func (st *store) storage() *Storage { return st.shared.cfg.Storage }

// ensure opens the log and marks it. One caller at a time.
func (st *store) ensure() (log *openLog, err error) {
	if log = st.log.Load(); log == nil {
		if log, err = st.create(); err != nil {
			return nil, err
		}
	}
	if !st.logged.Load() {
		if err := st.mark(log); err != nil {
			return nil, err
		}
	}
	return log, nil
}

// mark has the metadata file say that the topic has a log, and returns when that is stored.
// The log has a snapshot of cursors before: a crash in between leaves a log without a mark,
// which raises no alarm. A replicated log has no mark.
func (st *store) mark(log *openLog) error {
	files, is := log.topicLog.(*commitlog.Files)
	if !is {
		return nil
	}
	st.mu.Lock()
	snapshot := st.snapshot(nil)
	st.mu.Unlock()
	if err := files.FoundCursors(snapshot); err != nil {
		return err
	}
	st.logged.Store(true)
	st.shared.recorded()
	// A broker that closes writes the metadata file after the logs.
	if err := st.shared.Recorded(); err != nil && !errors.Is(err, ErrDraining) {
		st.logged.Store(false)
		return err
	}
	return nil
}

// create opens a log of which nothing was restored.
func (st *store) create() (*openLog, error) {
	for {
		closes := st.storage().closes()
		log, err := st.storage().open(st.name)
		switch {
		case err == nil:
			next, err := log.Append(nil)
			if err == nil && queue.Offset(next) == st.storage().kept[st.name] {
				st.opened(log)
				return log, nil
			}
			if err == nil && !st.removes(log) {
				// A takeover of it was under way, or another process of this name has it.
				return nil, errors.Join(errors.New("the topic's part has messages of before it was given up"), log.Close())
			}
			// Nothing of it was restored: what is in it is an earlier topic's of that name.
			if err := errors.Join(err, log.Remove()); err != nil {
				return nil, err
			}
			continue
		case !errors.Is(err, commitlog.ErrInUse):
			return nil, err
		}
		// An earlier life of the topic is removing its files; or a later one has its own
		// already.
		if !st.current() {
			return nil, ErrGone
		}
		select {
		case <-st.stop:
			return nil, ErrGone
		case <-closes:
		}
	}
}

// removes reports whether a log that was opened, and of which nothing was restored, is to be
// removed. Of a replicated one only what this broker was to remove before; and where a
// loaddistributor has topics taken over, nothing.
func (st *store) removes(log *openLog) bool {
	l, is := log.topicLog.(*replicated.Log)
	return !is || log.Stats().Records == 0 || st.shared.cfg.AutoCreate && l.Left()
}

// append is for who publishes to the disk. One caller at a time: storing.
func (st *store) append(records []commitlog.Record) (first commitlog.Offset, err error) {
	log, err := st.ensure()
	if err == nil {
		first, err = log.Append(records)
	}
	if !errors.Is(err, ErrGone) {
		st.noted(publishing, err)
	}
	return first, err
}

// write writes a batch, if there is any.
func (st *store) write() (wrote bool, err error) {
	x := st.scratch
	s := st.begin()
	var upTo queue.Offset
	x.batch, upTo = st.mu.core.TakeUnwritten(st.shared.now(), x.batch[:0], spillBatch, spillBytes, &s.fx)
	x.records = x.records[:0]
	for _, m := range x.batch {
		x.records = append(x.records, st.storage().epoch.record(m, !st.mu.core.Waits(m)))
	}
	st.end(s)
	if len(x.batch) == 0 {
		return false, nil
	}
	log, err := st.ensure()
	if err == nil {
		st.mu.Lock()
		first := !st.disk.used
		st.disk.used = true
		st.mu.Unlock()
		if first { // or a crash would undo an order that found nothing to save
			_ = st.settled() // else the store saves them again soon
		}
		_, err = log.Append(x.records)
	}
	s = st.begin()
	if err == nil {
		st.mu.core.Written(st.shared.now(), upTo, &s.fx)
	}
	s.fx.Unref(x.batch)
	st.end(s)
	clear(x.batch)
	clear(x.records)
	st.room.Broadcast()
	return err == nil, err
}

// refill gets back what is wanted, and returns how many messages that were.
func (st *store) refill() (int, error) {
	x := st.scratch
	log := st.log.Load()
	if log == nil {
		return 0, nil
	}
	st.mu.Lock()
	st.mu.core.SetTight(st.tight(0))
	from, want, end := st.mu.core.Want()
	bytes := st.storage().readAhead()
	if st.shared.cfg.MaxMemory > 0 && want > 1 {
		// Half of what is left for bodies, half for what messages take beside them.
		half := max(0, int(st.fiveTimesLeft()/10))
		bytes, want = min(bytes, half), min(want, max(1, half/queue.Overhead))
		ahead := int64(bytes + want*queue.Overhead) // other topics read at the same time
		st.shared.held.Add(ahead)
		defer st.shared.held.Add(-ahead)
	}
	st.mu.Unlock()
	if want == 0 {
		return 0, nil
	}
	if err := log.Read(commitlog.Offset(from), commitlog.Limit{Records: want, Bytes: bytes}, &x.read); err != nil {
		return 0, err
	}
	upTo := queue.Offset(x.read.Next)
	if upTo == from {
		upTo = end // there is nothing
	}
	x.msgs = x.msgs[:0]
	for i := range x.read.Records {
		x.msgs = append(x.msgs, st.shared.restored(&x.read.Records[i]))
	}
	st.do(func(now mono.Time, s *step) { st.mu.core.Refill(now, from, upTo, x.msgs, &s.fx) })
	clear(x.msgs)
	return max(1, len(x.msgs)), nil
}

// save records on disk which messages are done with, and lets go of files.
func (st *store) save() error {
	err := st.tryToSave()
	known := st.faults.Load()&(1<<saving) != 0
	st.noted(saving, err)
	if err != nil && !known {
		st.report("what is done with is not recorded on disk; after a crash it would come again", err)
	}
	return err
}

// errUntrimmed: all is recorded, and what is done with takes room still.
var errUntrimmed = errors.New("what is done with is not deleted")

// snapshot appends what is saved with the log. Requires: mu held.
func (st *store) snapshot(b []byte) []byte {
	if st.roster != nil {
		b = st.roster(b)
	}
	return st.mu.core.Snapshot(b, st.storage().moment().wallOf)
}

func (st *store) tryToSave() error {
	st.saving.Lock()
	defer st.saving.Unlock()
	x := st.scratch
	log := st.log.Load()
	st.mu.Lock()
	if log == nil || !st.unsaved() {
		st.mu.Unlock()
		return nil
	}
	st.mu.Unlock()
	if err := st.carry(log); err != nil {
		return err
	}
	st.mu.Lock()
	began := st.shared.now()
	changes, low, end := st.mu.core.Changes(), st.mu.core.Low(), st.mu.core.End()
	x.snapshot = st.snapshot(x.snapshot[:0])
	st.locked = st.shared.now().Sub(began)
	st.mu.Unlock()
	err := log.SaveCursors(x.snapshot)
	if err != nil && st.carried {
		return err // an older snapshot needs what was carried forward where it was
	}
	// Also where the disk is full, which this may end. What an older snapshot names and
	// is gone, is done.
	trimmed := log.Trim(commitlog.Offset(low))
	if err != nil {
		return errors.Join(err, trimmed)
	}
	if trimmed != nil {
		return fmt.Errorf("%w: %w", errUntrimmed, trimmed)
	}
	st.carried = false
	st.mu.Lock()
	st.disk.saved = changes
	st.retained(log)
	if low == end && st.mu.core.Changes() == changes {
		st.disk.used = false // until the next message is written
	}
	st.mu.Unlock()
	return nil
}

// carry carries forward what keeps much of the log, if it is little.
func (st *store) carry(log *openLog) error {
	x := st.scratch
	if st.through { // no publisher appends meanwhile
		st.storing.Lock()
		defer st.storing.Unlock()
	}
	files := log.Stats().Segments
	failing := st.faults.Load()&(1<<saving) != 0 // first something is to succeed that takes no room
	s := st.begin()
	if !failing && !st.mu.closed && (files > carryAfter || st.mu.core.FarAhead()) {
		x.carried = st.mu.core.Stuck(x.carried[:0], carryRatio)
	}
	var records []commitlog.Record
	if st.carried = st.carried || len(x.carried) > 0; st.through {
		for _, k := range x.carried {
			records = append(records, st.storage().epoch.record(k.Message, true))
		}
	} else {
		st.mu.core.Carry(st.shared.now(), x.carried, &s.fx)
	}
	st.end(s)
	defer func() { clear(x.carried); x.carried = x.carried[:0] }()
	if len(records) > 0 {
		first, err := log.Append(records)
		if err != nil {
			return err
		}
		if st.storage().cfg.Fsync { // before the snapshot says that the old places are done
			err = log.Sync(first + commitlog.Offset(len(records)))
		}
		s := st.begin()
		st.mu.core.CarriedTo(st.shared.now(), queue.Offset(first), x.carried, err == nil, &s.fx)
		st.end(s)
		if err != nil {
			return err
		}
	}
	for {
		st.mu.Lock()
		more := st.mu.core.Carrying()
		st.mu.Unlock()
		if !more {
			return nil
		}
		if _, err := st.write(); err != nil {
			return err
		}
	}
}
