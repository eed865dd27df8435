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

// store connects a topic to its log. It writes messages that do not fit into memory, reads
// messages for cursors that are behind, and saves the cursors. A goroutine, timers and
// scratch exist only while there is something to do.
//
// Acceptance does not wait for the store: messages on their way to disk are still in
// memory, bounded by queue.Config.Overflow. If the disk is full, the topic fills up and
// refuses messages until writing succeeds again. The store retries forever.
//
// Invariants:
//   - With WriteThrough, only publishers append, under storing. Otherwise only run appends,
//     each message at its offset, in order.
//   - When cursors are saved, every message that the cursors need is in the log, or in
//     memory alone.
//   - Messages deleted from the log are finished in all channels.
type store struct {
	// Set once.
	runner  *runner
	current func() bool // whether the topic is still in the broker's table
	fenced  func()      // called when another broker owns the log
	// roster and restoreRoster handle the topic's roster, and require mu held; nil if the
	// log is not replicated.
	roster        func([]byte) []byte
	restoreRoster func(roster)
	stop          chan struct{} // closed under mu, once
	gone          chan struct{} // closed when the log of a deleted topic is removed, or the removal has failed

	// saving orders the operations that read the cursors and act on them: saving, trimming
	// and seeking. Taken before storing.
	saving sync.Mutex

	// log is nil until first used; set once, by ensure or Restore.
	log atomic.Pointer[openLog]
	// faults has a bit per concern with a fault in Storage.health. Without a fault, a
	// success need not lock health. The goroutine that reports a concern writes its bit.
	faults atomic.Uint32
	// logged is metadata.Topic.Logged. Written by ensure, Restore and Close, one at a time.
	logged atomic.Bool

	// epochs are the epochs of the log's records. Written as records are appended.
	epochs epochs

	// Guarded by mu.
	remove    bool                // the topic was deleted: remove the log at the end
	unremoved error               // why the log of a deleted topic could not be removed
	missing   uint64              // gaps in messages or cursors found during the restoration
	retain    *metadata.Retention // the topic's own retention; nil: StorageConfig.Retain
	failing   bool                // writing to the disk fails
	// unrecorded: no earlier process recorded the topic. The topic gets the channels of its
	// log, and is not recorded before it has them.
	unrecorded bool

	// Owned by run. Before run starts and after it has ended, owned by the owner of the
	// topic.
	scratch   *scratch
	rewritten bool          // messages were carried forward since the last snapshot
	empty     bool          // when the broker closed, the topic had no message to store
	obsolete  bool          // empty, and the next process does not need the log
	lockTime  time.Duration // time for which the last snapshot held mu
}

// scratch is the memory of a running store.
type scratch struct {
	batch    []*queue.Message
	records  []commitlog.Record
	read     commitlog.Batch
	msgs     []*queue.Message
	snapshot []byte
	carried  []queue.Carried
}

// savePause returns the wait between saves, from the size of the last snapshot in bytes,
// and the time for which the snapshot held the topic's lock. Between saves, other
// goroutines can use the lock for at least saveRatio times that time, up to maxSavePause.
func savePause(snapshot int, locked time.Duration) time.Duration {
	return max(saveInterval, time.Duration(snapshot)*time.Second/savePace, min(saveRatio*locked, maxSavePause))
}

// DefaultReadAhead is the default of StorageConfig.ReadAhead.
const DefaultReadAhead = 4 << 20

const (
	spillBatch = 256     // messages per write
	spillBytes = 4 << 20 // message bytes per write, without the last message; each message is copied
	spillRetry = 250 * time.Millisecond

	// saveInterval is the minimum interval between saves of finished messages and deletions
	// of files. After a crash, messages finished since the last save are delivered again.
	// See savePause.
	saveInterval = 200 * time.Millisecond
	savePace     = 8 << 20 // bytes per second
	saveRatio    = 20
	maxSavePause = 10 * time.Second

	// If messages keep more than carryAfter files from deletion, they are carried forward,
	// provided that they are at most one in carryRatio of the later messages.
	carryAfter = 2
	carryRatio = 100
)

// newStore creates the store and the disk of a runner.
func newStore(r *runner, current func() bool, fenced func()) *store {
	st := &store{runner: r, current: current, fenced: fenced, stop: make(chan struct{}), gone: make(chan struct{})}
	r.disk = &disk{run: st.run, workers: &r.shared.workers, wake: make(chan struct{}, 1)}
	return st
}

// full reports whether the log exceeds its maximum size, so publications are refused.
// Accepted messages are still written. A nil store is never full.
func (st *store) full() bool {
	if st == nil || st.storage().cfg.MaxLogBytes == 0 {
		return false
	}
	log, most := st.log.Load(), st.storage().cfg.MaxLogBytes
	return log != nil && log.Size() >= most && log.Needed() >= most
}

// spilling reports whether the topic's messages are being written to disk. A nil store
// writes nothing.
// Requires: mu held.
func (st *store) spilling() bool { return st != nil && st.runner.disk.running && !st.failing }

// endLocked stops the store. With remove it deletes the log. Requires: mu held.
func (st *store) endLocked(remove bool) {
	d := st.runner.disk
	if d.stopped {
		return
	}
	if remove && st.log.Load() != nil {
		d.start() // removes the log outside the lock
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
	save := time.NewTimer(savePause(0, st.lockTime))
	defer save.Stop()
	saves := true // the timer is set
	for more := true; more; {
		select {
		case <-st.stop:
			st.conclude()
			return
		case <-st.runner.disk.wake:
		case <-retry.C:
		case <-save.C:
			saves = false
			if err := st.save(); err != nil {
				saves = true
				save.Reset(savePause(0, st.lockTime))
			}
		}
		for st.writeAndRead() {
			select {
			case <-st.stop:
				st.conclude()
				return
			default:
			}
		}
		st.runner.mu.Lock()
		failing := st.failing
		if st.runner.unsaved() && !saves {
			save.Reset(savePause(len(st.scratch.snapshot), st.lockTime))
			saves = true
		}
		_, want, _ := st.runner.mu.core.Disk().Want()
		// If stopped is set since the last check, the loop ends above, where the log is
		// removed.
		more = st.runner.disk.stopped || failing || saves || want > 0 || st.runner.mu.core.Log().Unwritten()
		if !more {
			st.scratch = nil
		}
		st.runner.disk.running = more // last, since another run may start now
		st.runner.mu.Unlock()
		if log := st.log.Load(); !more && log != nil {
			st.runner.do(func(_ mono.Time, s *step) { st.runner.mu.core.Log().ForgetRead(&s.fx) })
			_ = log.Rest() // the log is closed, or reports the error itself
		}
		if failing {
			retry.Reset(spillRetry)
		}
	}
}

// conclude removes the log of a deleted topic. Otherwise persist stores the rest.
func (st *store) conclude() {
	st.runner.mu.Lock()
	remove := st.remove
	st.runner.mu.Unlock()
	if !remove {
		return
	}
	defer close(st.gone)
	if log := st.log.Load(); log != nil {
		if err := log.Remove(); err != nil && !errors.Is(err, commitlog.ErrClosed) {
			st.report("cannot remove the topic's log; after a restart the topic is back", err)
			st.runner.mu.Lock()
			st.unremoved = err
			st.runner.mu.Unlock()
		}
	}
	st.storage().health.forget(st.runner.name)
}

// writeAndRead writes a batch and reads a batch, and reports whether there may be more to do. A
// failed write does not prevent the read, which may make room.
func (st *store) writeAndRead() (more bool) {
	wrote, failed := st.write()
	n, err := st.refill()
	switch {
	case err != nil:
		return st.fault("cannot read messages from disk; retrying", err)
	case failed != nil:
		return st.fault("cannot write messages to disk; retrying", failed)
	}
	if st.setFailing(false) {
		st.recordResult(spilling, nil)
	}
	return wrote || n > 0
}

// setFailing sets failing and returns the previous value.
func (st *store) setFailing(failing bool) (was bool) {
	st.runner.mu.Lock()
	was, st.failing = st.failing, failing
	st.runner.mu.Unlock()
	st.runner.room.Broadcast()
	return was
}

// fault logs the first of several consecutive failures, and schedules a retry.
func (st *store) fault(what string, err error) (more bool) {
	st.recordResult(spilling, err)
	if !st.setFailing(true) {
		st.report(what, err)
	}
	return false
}

func (st *store) report(what string, err error) {
	st.storage().log.Error(what, obs.KeyTopic, st.runner.name, obs.KeyError, err)
}

// recordResult records the result of the topic's last attempt at an operation.
func (st *store) recordResult(what operation, err error) {
	if errors.Is(err, replicated.ErrFenced) {
		st.fenced()
	}
	bit := uint32(1) << what
	if err == nil && st.faults.Load()&bit == 0 {
		return
	}
	st.storage().health.note(faultKey{st.runner.name, what}, err)
	if err == nil {
		st.faults.And(^bit)
	} else if first := st.faults.Or(bit)&bit == 0; first && what == publishing { // the store reports other concerns
		st.report("cannot store messages; refusing publishes until the disk accepts writes", err)
	}
}

func (st *store) storage() *Storage { return st.runner.shared.cfg.Storage }

// ensure opens the log if necessary, and marks it. Only one goroutine may call ensure at a
// time.
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

// mark records in the metadata file that the topic has a log, and returns after the file is
// written. Before the mark, the log gets a snapshot of the cursors. So a crash in between
// leaves a log without a mark, which raises no alarm. A replicated log has no mark.
func (st *store) mark(log *openLog) error {
	files, ok := log.Log.(*commitlog.Files)
	if !ok {
		return nil
	}
	st.runner.mu.Lock()
	snapshot := st.snapshot(nil)
	st.runner.mu.Unlock()
	if err := files.FoundCursors(snapshot); err != nil {
		return err
	}
	st.logged.Store(true)
	st.runner.shared.recorded(st.runner.name)
	// A closing broker writes the metadata file after the logs.
	if err := st.runner.shared.Recorded(); err != nil && !errors.Is(err, ErrDraining) {
		st.logged.Store(false)
		st.runner.shared.recorded(st.runner.name)
		return err
	}
	return nil
}

// create opens a log without restored messages.
func (st *store) create() (*openLog, error) {
	for {
		closes := st.storage().closes()
		log, err := st.storage().open(st.runner.name)
		switch {
		case err == nil:
			next, err := log.Append(nil)
			if err == nil && queue.Offset(next) == st.storage().nextOffsets[st.runner.name] {
				st.runner.mu.Lock()
				log.SetRetain(st.retention())
				st.retained(log)
				st.runner.mu.Unlock()
				st.log.Store(log)
				return log, nil
			}
			if err == nil && !st.removes(log) {
				// A takeover of the log was in progress, or another process with this name
				// uses the log.
				return nil, errors.Join(errors.New("the topic's log has messages from before another broker took the topic over"), log.Close())
			}
			// Nothing was restored, so the contents belong to an earlier topic of this
			// name.
			if err := errors.Join(err, log.Remove()); err != nil {
				return nil, err
			}
			continue
		case !errors.Is(err, commitlog.ErrInUse):
			return nil, err
		}
		// An earlier topic of this name is still removing its files, or a later topic
		// already has files.
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

// removes reports whether to remove a log from which nothing was restored. A replicated log
// is removed only if this broker was to remove it before. In a cluster no log with messages
// is removed, since topics are taken over.
func (st *store) removes(log *openLog) bool {
	l, ok := log.Log.(*replicated.Log)
	return !ok || log.Stats().Records == 0 || st.runner.shared.cfg.AutoCreate && l.Unremoved()
}

// append appends records for publishers. Requires: storing held.
func (st *store) append(e *epoch, records []commitlog.Record) (first commitlog.Offset, err error) {
	log, err := st.ensure()
	if err == nil {
		first, err = st.epochs.append(log, e, records)
	}
	if !errors.Is(err, ErrGone) {
		st.recordResult(publishing, err)
	}
	return first, err
}

// write writes a batch, if there is one.
func (st *store) write() (wrote bool, err error) {
	x := st.scratch
	s := st.runner.begin()
	var upTo queue.Offset
	x.batch, upTo = st.runner.mu.core.Disk().TakeUnwritten(st.runner.shared.now(), x.batch[:0], spillBatch, spillBytes, &s.fx)
	x.records = x.records[:0]
	e := st.storage().current()
	for _, m := range x.batch {
		x.records = append(x.records, e.record(m, !st.runner.mu.core.Backlog().Waits(m)))
	}
	st.runner.end(s)
	if len(x.batch) == 0 {
		return false, nil
	}
	log, err := st.ensure()
	if err == nil {
		st.runner.mu.Lock()
		first := !st.runner.disk.used
		st.runner.disk.used = true
		st.runner.mu.Unlock()
		// otherwise a crash would undo an order that had no cursors to save; on an error
		// the store soon saves again
		if first {
			_ = st.settled()
		}
		_, err = st.epochs.append(log, e, x.records)
	}
	s = st.runner.begin()
	if err == nil {
		st.runner.mu.core.Disk().Written(st.runner.shared.now(), upTo, &s.fx)
	}
	s.fx.Unref(x.batch)
	st.runner.end(s)
	clear(x.batch)
	clear(x.records)
	st.runner.room.Broadcast()
	return err == nil, err
}

// refill reads the wanted messages, and returns their number.
func (st *store) refill() (int, error) {
	x := st.scratch
	log := st.log.Load()
	if log == nil {
		return 0, nil
	}
	st.runner.mu.Lock()
	st.runner.mu.core.Log().SetTight(st.runner.tight(0))
	from, want, end := st.runner.mu.core.Disk().Want()
	bytes := st.storage().readAhead()
	if st.runner.shared.cfg.MaxMemory > 0 && want > 1 {
		// Half of the free memory for bodies, half for the overhead of messages.
		half := max(0, int(st.runner.fiveTimesLeft()/10))
		bytes, want = min(bytes, half), min(want, max(1, half/queue.Overhead))
		ahead := int64(bytes + want*queue.Overhead) // other topics read at the same time
		st.runner.shared.held.Add(ahead)
		defer st.runner.shared.held.Add(-ahead)
	}
	st.runner.mu.Unlock()
	if want == 0 {
		return 0, nil
	}
	if err := log.Read(commitlog.Offset(from), commitlog.Limit{Records: want, Bytes: bytes}, &x.read); err != nil {
		return 0, err
	}
	upTo := queue.Offset(x.read.Next)
	if upTo == from {
		upTo = end // no messages in the range
	}
	x.msgs = x.msgs[:0]
	earlier := st.storage().current()
	for i := range x.read.Records {
		r := &x.read.Records[i]
		x.msgs = append(x.msgs, st.runner.shared.restored(st.epochs.at(r.Offset, earlier), r))
	}
	st.runner.do(func(now mono.Time, s *step) { st.runner.mu.core.Disk().Refill(now, from, upTo, x.msgs, &s.fx) })
	clear(x.msgs)
	return max(1, len(x.msgs)), nil
}

// save records finished messages on disk, and deletes obsolete files.
func (st *store) save() error {
	err := st.tryToSave()
	failing := st.faults.Load()&(1<<saving) != 0
	st.recordResult(saving, err)
	if err != nil && !failing {
		st.report("cannot save the record of finished messages; after a crash they are delivered again", err)
	}
	return err
}

// errUntrimmed: the cursors are saved, but finished messages are not deleted.
var errUntrimmed = errors.New("cannot delete finished messages")

// snapshot appends the data that is saved with the log. Requires: mu held.
func (st *store) snapshot(b []byte) []byte {
	if st.roster != nil {
		b = st.roster(b)
	}
	now := st.storage().moment()
	return st.runner.mu.core.Cursors().Snapshot(b, now.wallOf)
}

func (st *store) tryToSave() error {
	st.saving.Lock()
	defer st.saving.Unlock()
	x := st.scratch
	log := st.log.Load()
	st.runner.mu.Lock()
	if log == nil || !st.runner.unsaved() {
		st.runner.mu.Unlock()
		return nil
	}
	st.runner.mu.Unlock()
	if err := st.carry(log); err != nil {
		return err
	}
	st.runner.mu.Lock()
	began := st.runner.shared.now()
	changes, low, end := st.runner.mu.core.Log().Changes(), st.runner.mu.core.Cursors().Low(), st.runner.mu.core.Log().End()
	x.snapshot = st.snapshot(x.snapshot[:0])
	st.lockTime = st.runner.shared.now().Sub(began)
	st.runner.mu.Unlock()
	err := log.SaveCursors(x.snapshot)
	if err != nil && st.rewritten {
		return err // an older snapshot needs the old positions of messages carried forward
	}
	// Trim even if the disk is full, since trimming may free room. An older snapshot may
	// name trimmed messages; they are finished.
	trimmed := log.Trim(commitlog.Offset(low))
	if err != nil {
		return errors.Join(err, trimmed)
	}
	if trimmed != nil {
		return fmt.Errorf("%w: %w", errUntrimmed, trimmed)
	}
	st.rewritten = false
	st.runner.mu.Lock()
	st.runner.disk.saved = changes
	st.retained(log)
	if low == end && st.runner.mu.core.Log().Changes() == changes {
		st.runner.disk.used = false // until the next write
	}
	st.runner.mu.Unlock()
	return nil
}

// carry carries forward the few messages that keep many files of the log from deletion.
func (st *store) carry(log *openLog) error {
	x := st.scratch
	if st.runner.writeThrough { // excludes publishers
		st.runner.storing.Lock()
		defer st.runner.storing.Unlock()
	}
	files := log.Stats().Segments
	failing := st.faults.Load()&(1<<saving) != 0 // first, a save without additional room must succeed
	s := st.runner.begin()
	if !failing && !st.runner.mu.closed && (files > carryAfter || st.runner.mu.core.Cursors().FarAhead()) {
		x.carried = st.runner.mu.core.Cursors().Stuck(x.carried[:0], carryRatio)
	}
	var records []commitlog.Record
	e := st.storage().current()
	if st.rewritten = st.rewritten || len(x.carried) > 0; st.runner.writeThrough {
		for _, k := range x.carried {
			records = append(records, e.record(k.Message, true))
		}
	} else {
		st.runner.mu.core.Disk().Carry(st.runner.shared.now(), x.carried, &s.fx)
	}
	st.runner.end(s)
	defer func() { clear(x.carried); x.carried = x.carried[:0] }()
	if len(records) > 0 {
		first, err := st.epochs.append(log, e, records)
		if err != nil {
			return err
		}
		if st.storage().cfg.Fsync { // before a snapshot declares the old positions finished
			err = log.Sync(first + commitlog.Offset(len(records)))
		}
		s := st.runner.begin()
		st.runner.mu.core.Disk().CarriedTo(st.runner.shared.now(), queue.Offset(first), x.carried, err == nil, &s.fx)
		st.runner.end(s)
		if err != nil {
			return err
		}
	}
	for {
		st.runner.mu.Lock()
		more := st.runner.mu.core.Log().Carrying()
		st.runner.mu.Unlock()
		if !more {
			return nil
		}
		if _, err := st.write(); err != nil {
			return err
		}
	}
}
