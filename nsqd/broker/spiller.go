package broker

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsqd/diskqueue"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// spiller moves the messages of one line between memory and disk. It has a
// goroutine, timers and scratch only while there is something to do.
//
// Acceptance does not wait for it: what is on its way to disk is in memory
// still, bounded by queue.Config.Overflow. When the disk is full the line fills
// up behind it and refuses, until writing works again; it tries for ever.
type spiller struct {
	// Set once.
	topic *Topic
	line  *queue.Line
	wake  chan struct{} // 1 deep: there is something to write or to get
	stop  chan struct{} // closed under topic.mu, once

	// disk is nil until first used; set once, by ensure or Restore.
	disk atomic.Pointer[diskqueue.Queue]
	// resume is what an earlier process had in memory, for as long as not all of it
	// is done with; nil if there is no such thing. Written by whoever may use what
	// run owns.
	resume atomic.Pointer[diskqueue.Queue]

	// faults has the bit of each concern that was noted in Storage.health, so that
	// nobody need look there who has nothing to tell. Whoever has such a concern
	// writes its bit.
	faults atomic.Uint32

	// Guarded by topic.mu.
	running bool
	stopped bool
	remove  bool // the channel or topic was deleted: remove the queue at the end
	failing bool // the disk does not take messages now
	reading tickets
	resumed tickets // of resume
	unsaved bool    // save has something to do

	// Owned by run; before it starts and after it has ended, by whoever holds
	// the topic.
	onDisk int                // messages there that were not read; not with Through
	read   diskqueue.Position // up to where they were
	stays  bool               // something of that could be neither read nor put aside
	valid  queue.Epoch        // what is on disk is of this epoch
	saved  saved              // with Through
	replay replay             // with Through, of a topic's own line
	past   diskqueue.Position // up to where resume is released and checkpointed
	batch  []*queue.Message   // taken from the line, between two turns empty
	taken  queue.Epoch        // epoch of batch
	rests  int                // how often to checkpoint yet, before the queue rests
	enc    encoder
	kept   []queue.Kept
}

const (
	spillBatch  = 256     // messages in one write
	spillBytes  = 4 << 20 // of messages in one write, without the last: each is copied twice on its way
	refillBytes = 4 << 20 // of records in one read
	spillRetry  = 250 * time.Millisecond

	// saveInterval is how often it is recorded which messages are done with, and
	// files are deleted that have no other; after a crash those since then are
	// delivered again.
	saveInterval = 200 * time.Millisecond

	// restAfter is how many checkpoints after the last change let go of all that
	// an unused queue need not have.
	restAfter = 2
)

// spiller returns the line's spiller, not running. Requires: mu held.
func (t *Topic) spiller(l *queue.Line) *spiller {
	sp := t.mu.spillers[l]
	if sp == nil {
		sp = &spiller{topic: t, line: l, wake: make(chan struct{}, 1), stop: make(chan struct{})}
		t.mu.spillers[l] = sp
	}
	return sp
}

// startLocked runs the spiller if it does not run. Requires: mu held, open.
func (sp *spiller) startLocked() {
	if !sp.running && !sp.stopped {
		sp.running = true
		sp.topic.broker.workers.Go(sp.run)
	}
}

// endLocked stops the spiller; with remove its queue is deleted.
// Requires: mu held.
func (sp *spiller) endLocked(remove bool) {
	if sp.stopped {
		return
	}
	sp.stopped, sp.remove = true, remove
	close(sp.stop)
	if remove && !sp.running && (sp.disk.Load() != nil || sp.resume.Load() != nil) {
		sp.running = true // only to remove the queue, outside the lock
		sp.topic.broker.workers.Go(sp.run)
	}
}

func (sp *spiller) notify() {
	select {
	case sp.wake <- struct{}{}:
	default:
	}
}

func (sp *spiller) run() {
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	retry.Stop()
	save := time.NewTimer(saveInterval)
	defer save.Stop()
	saves := true // the timer is set
	for more := true; more; {
		select {
		case <-sp.stop:
			sp.end()
			return
		case <-sp.wake:
		case <-retry.C:
		case <-save.C:
			again, err := sp.save()
			sp.noted(saving, err)
			if err != nil {
				sp.log("what is done with is not recorded on disk; after a crash it would come again", err)
			}
			if saves = again || err != nil; saves {
				save.Reset(saveInterval)
			}
		}
		for sp.turn() {
			select {
			case <-sp.stop:
				sp.end()
				return
			default:
			}
		}
		sp.topic.mu.Lock()
		failing := sp.failing
		if sp.unsaved && !saves {
			save.Reset(saveInterval)
			saves = true
		}
		want, epoch := sp.line.Wanted()
		more = failing || saves || want > 0 || sp.line.Pending() || epoch != sp.valid
		if !more {
			sp.batch, sp.kept, sp.enc = nil, nil, encoder{}
		}
		sp.running = more // last: from now on there may be another
		sp.topic.mu.Unlock()
		if failing {
			retry.Reset(spillRetry)
		}
	}
}

// end removes the queue if that is wanted; otherwise it is left to persist.
func (sp *spiller) end() {
	sp.topic.mu.Lock()
	remove := sp.remove
	sp.topic.mu.Unlock()
	for _, disk := range []*diskqueue.Queue{sp.disk.Load(), sp.resume.Load()} {
		if !remove || disk == nil {
			continue
		}
		if err := disk.Remove(); err != nil && !errors.Is(err, diskqueue.ErrClosed) {
			sp.log("queue on disk not removed", err)
		}
	}
	if remove {
		sp.storage().health.forget(sp.name())
	}
}

// turn writes one batch and gets one back. It reports whether there may be
// more to do. That nothing can be written does not keep it from reading: it may
// be what makes room.
func (sp *spiller) turn() (more bool) {
	t := sp.topic
	t.mu.Lock()
	_, now := sp.line.TakeOverflow(nil, 0)
	t.mu.Unlock()
	if sp.valid != now {
		if err := sp.discard(); err != nil {
			return sp.fault("queue on disk not emptied", err)
		}
		t.mu.Lock()
		sp.reading.void()
		t.mu.Unlock()
		sp.valid = now
	}
	wrote, failed := sp.write()
	n, err := sp.refill()
	switch {
	case err != nil:
		return sp.fault("messages not read from disk; trying again", err)
	case failed != nil:
		return sp.fault("messages not written to disk; trying again", failed)
	}
	if sp.setFailing(false) {
		sp.noted(spilling, nil)
	}
	return wrote || n > 0
}

// setFailing returns what it was before.
func (sp *spiller) setFailing(is bool) (was bool) {
	t := sp.topic
	t.mu.Lock()
	was, sp.failing = sp.failing, is
	t.mu.Unlock()
	t.room.Broadcast()
	return was
}

// fault logs the first of a row of failures, and asks for a retry.
func (sp *spiller) fault(what string, err error) (more bool) {
	sp.noted(spilling, err)
	if !sp.setFailing(true) {
		sp.log(what, err)
	}
	return false
}

func (sp *spiller) log(what string, err error) {
	sp.storage().cfg.Log.Error(what, obs.KeyTopic, sp.topic.name, "queue", sp.name(), obs.KeyError, err)
}

// noted says how the line's last attempt at something ended.
func (sp *spiller) noted(what concern, err error) {
	bit := uint32(1) << what
	if err == nil && sp.faults.Load()&bit == 0 {
		return
	}
	sp.storage().health.note(place{sp.name(), what}, err)
	if err == nil {
		sp.faults.And(^bit)
	} else {
		sp.faults.Or(bit)
	}
}

func (sp *spiller) storage() *Storage { return sp.topic.broker.cfg.Storage }

// name is that of the line's queue.
func (sp *spiller) name() string { return lineName(sp.topic.name, sp.line.Channel()) }

// ensure opens the queue. One caller at a time.
func (sp *spiller) ensure() (*diskqueue.Queue, error) {
	if disk := sp.disk.Load(); disk != nil {
		return disk, nil
	}
	for {
		closes := sp.storage().dir.Closes()
		disk, err := sp.storage().openEmpty(sp.name())
		switch {
		case err == nil:
			sp.disk.Store(disk)
			return disk, nil
		case !errors.Is(err, diskqueue.ErrInUse):
			return nil, err
		}
		// An earlier life of the topic or channel is removing its files; or a later
		// one has its own already.
		if now, _ := sp.topic.broker.Topic([]byte(sp.topic.name)); now != sp.topic {
			return nil, ErrGone
		}
		select {
		case <-sp.stop:
			return nil, ErrGone
		case <-closes:
		}
	}
}

// discard empties the queue after the line was emptied.
func (sp *spiller) discard() error {
	disk := sp.disk.Load()
	if disk == nil || sp.line.Through() && sp.line.Channel() == nil {
		return nil // Topic.Empty has done it, in step with the publishers
	}
	if err := disk.Empty(); err != nil {
		return err
	}
	sp.onDisk = 0
	return nil
}

// write writes a batch, if there is any.
func (sp *spiller) write() (wrote bool, err error) {
	t := sp.topic
	t.mu.Lock()
	sp.batch = sp.batch[:0]
	for n, size := 0, 0; n < spillBatch && size < spillBytes; n++ {
		if sp.batch, sp.taken = sp.line.TakeOverflow(sp.batch, 1); len(sp.batch) == n {
			break
		}
		size += sp.batch[n].Size()
	}
	t.mu.Unlock()
	if len(sp.batch) == 0 {
		return false, nil
	}
	err = sp.append(sp.batch)
	s := t.begin()
	now := t.broker.now()
	if err != nil {
		t.mu.core.Unstored(now, sp.line, sp.taken, sp.batch, &s.fx)
	} else {
		// Void if the line was emptied meanwhile; the next turn then discards.
		t.mu.core.Stored(now, sp.line, sp.taken, len(sp.batch), &s.fx)
		t.mu.core.LetGo(sp.batch, &s.fx)
		sp.unsaved = true
	}
	t.end(s)
	clear(sp.batch)
	t.room.Broadcast()
	return err == nil, err
}

func (sp *spiller) append(batch []*queue.Message) error {
	disk, err := sp.ensure()
	if err != nil {
		return err
	}
	sp.kept = sp.kept[:0]
	for _, m := range batch {
		sp.kept = append(sp.kept, queue.Kept{Message: m})
	}
	err = sp.storage().append(disk, sp.kept, sp.line.Channel() != nil, &sp.enc)
	clear(sp.kept)
	if err != nil {
		return err
	}
	sp.onDisk += len(batch)
	sp.rests = restAfter
	return nil
}

// refill gets back what the line wants, and returns how many that were.
func (sp *spiller) refill() (int, error) {
	t := sp.topic
	t.mu.Lock()
	t.mu.core.SetTight(t.tight(0))
	want, e := sp.line.Wanted()
	bytes := refillBytes
	if t.broker.cfg.MaxMemory > 0 && want > 1 {
		// Half of what is left for bodies, half for what messages take beside them.
		half := max(0, int(t.fiveTimesLeft()/10))
		bytes, want = min(bytes, half), min(want, max(1, half/queue.Overhead))
		ahead := int64(bytes + want*queue.Overhead) // other topics read at the same time
		t.broker.held.Add(ahead)
		defer t.broker.held.Add(-ahead)
	}
	t.mu.Unlock()
	disk := sp.disk.Load()
	if want == 0 || e != sp.valid || disk == nil {
		return 0, nil
	}
	records, err := disk.Read(want, bytes, nil)
	if err != nil {
		return 0, err
	}
	kept := make([]queue.Kept, 0, len(records))
	ends := make([]diskqueue.Position, 0, len(records))
	var faulty []fault
	for _, r := range records {
		k, err := t.parse(r.Data)
		if err != nil {
			faulty = append(faulty, fault{r, err, len(kept)})
			continue
		}
		kept = append(kept, k)
		ends = append(ends, r.End)
	}
	failed := sp.storage().putAside(sp.name(), faulty)
	if failed != nil {
		sp.stays = true
		sp.log("messages on disk that are not readable stay where they are", failed)
	}
	lost := len(faulty)
	if len(records) > 0 {
		sp.read = records[len(records)-1].End
	}
	skipped, unlock := sp.skipped(disk, len(records))
	lost += skipped
	s := t.begin()
	defer unlock()
	defer t.end(s)
	now := t.broker.now()
	if _, present := sp.line.TakeOverflow(nil, 0); present != e {
		return 0, nil // emptied meanwhile
	}
	rest := faulty
	for i := range len(kept) + 1 {
		for ; len(rest) > 0 && rest[0].before == i; rest = rest[1:] {
			if k := sp.reading.issue(rest[0].record.End); failed == nil {
				sp.reading.done(k)
			}
		}
		if i < len(kept) {
			kept[i].Ticket = sp.reading.issue(ends[i])
		}
	}
	if sp.line.Through() {
		sp.replay.pass(t.mu.core, kept, ends)
	} else {
		// Held back, one message would keep on the disk all that was read after it.
		sp.reading.forget(mostUnfinished(t.broker.cfg.Capacity))
		sp.trackLocked()
	}
	if lost > 0 {
		t.mu.core.Lost(now, sp.line, e, lost, &s.fx)
	}
	t.mu.core.Refill(now, sp.line, e, kept, &s.fx)
	return len(records) + lost, nil
}

// mostUnfinished is how many messages that were read are kept on the disk, without
// Through, until they are finished: more than memory holds, so that some may be
// finished before those in front of them.
func mostUnfinished(capacity int) int { return 4*capacity + 1000 }

// trackLocked has the topic tell the spiller of its own line what nobody needs any
// longer. Requires: topic.mu held.
func (sp *spiller) trackLocked() {
	if sp.line.Channel() == nil {
		sp.topic.mu.tracking = sp
	}
}

// doneLocked notes that the message of a ticket is done with, and reports whether
// run has to be told. Requires: topic.mu held.
func (sp *spiller) doneLocked(k queue.Ticket) (tell bool) {
	if k&inResume != 0 {
		sp.resumed.done(k &^ inResume)
	} else {
		sp.reading.done(k)
	}
	tell = !sp.unsaved
	sp.unsaved = true
	return tell
}

// skipped returns how many messages the queue had to leave out since the last
// call, and a function to call once that is accounted for.
func (sp *spiller) skipped(disk *diskqueue.Queue, read int) (n int, unlock func()) {
	if !sp.line.Through() {
		unread, _ := disk.Unread()
		n = sp.onDisk - read - int(unread)
		sp.onDisk = int(unread)
		return n, func() {}
	}
	if disk.Stats().Quarantined == 0 {
		return 0, func() {}
	}
	// The line and the queue agree on what is stored only while nobody appends.
	sp.topic.storing.Lock()
	sp.topic.mu.Lock()
	stored := sp.line.Stored()
	sp.topic.mu.Unlock()
	unread, _ := disk.Unread()
	return stored - read - int(unread), sp.topic.storing.Unlock
}

// pending returns what is on its way to disk, in order.
// Requires: run has ended.
func (sp *spiller) pending() (kept []queue.Kept) {
	msgs, _ := sp.line.TakeOverflow(nil, 1<<30)
	for _, m := range msgs {
		kept = append(kept, queue.Kept{Message: m})
	}
	return kept
}

// close closes the queue, or removes it if nothing is in it.
// Requires: run has ended.
func (sp *spiller) close() error {
	disk := sp.disk.Load()
	if disk == nil {
		return nil
	}
	if end, any := sp.reading.doneUpTo(); any {
		disk.Release(end)
	}
	if n, _ := disk.Held(); n == 0 {
		return disk.Retire()
	}
	return disk.Close()
}
