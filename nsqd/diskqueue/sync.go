package diskqueue

import (
	"fmt"
	"math"

	"github.com/srtm-io/srtm/internal/obs"
)

// SyncError says that an fsync failed. The records that it was for may be on
// stable storage or not, and that cannot be found out: the system may count
// what it failed to write as written, so that the next fsync says nothing. So
// the segment is not appended to any more, and not fsynced again. Its records
// stay in the queue, and are read as long as they can be.
type SyncError struct {
	Queue   string
	Segment uint64
	Err     error
}

func (e *SyncError) Error() string {
	return fmt.Sprintf("records of queue %s may not be durable: sync segment %d: %v", e.Queue, e.Segment, e.Err)
}

func (e *SyncError) Unwrap() error { return e.Err }

// SyncTo returns nil when the records of the Append that returned p, and all
// before it that were not in a *SyncError, are on stable storage; at once if
// they are already, or are released. It waits for one fsync, seldom two: the
// callers at any time share them.
//
// A *SyncError concerns the records of that Append. Those that are appended
// later are in another file.
func (q *Queue) SyncTo(p Position) error { return q.syncTo(p, math.MaxUint64) }

// syncTo is SyncTo, and fsyncs no segment with a higher number than limit.
func (q *Queue) syncTo(p Position, limit uint64) error {
	return q.await(limit, func() (bool, error) {
		if lost := q.lostFrom(p.segment); lost != nil && lost.offset < p.offset {
			return true, &SyncError{Queue: q.name, Segment: p.segment, Err: errDamaged}
		}
		s := q.segment(p.segment)
		switch {
		case s == nil || p.offset <= s.synced || p.offset > s.end:
			return true, nil
		case s.fault != nil:
			return true, &SyncError{Queue: q.name, Segment: s.number, Err: s.fault}
		}
		return false, nil
	})
}

// Sync returns nil when all records that were appended before the call and are
// not released are on stable storage, including those that were there when the
// queue was opened, unless an fsync failed for them before that. A *SyncError
// stays until its records are released, or until the queue is closed if they
// could not be read; where each caller asks only for what is its own, SyncTo
// tells more.
func (q *Queue) Sync() error {
	q.mu.Lock()
	end := q.last()
	q.mu.Unlock()
	return q.await(math.MaxUint64, func() (bool, error) {
		if len(q.lost) > 0 {
			return true, &SyncError{Queue: q.name, Segment: q.lost[0].segment, Err: errDamaged}
		}
		from := q.unsynced
		if q.stats.SyncErrors > 0 {
			from = 0
		}
		for _, s := range q.segments[q.find(from):] {
			if s.number > end.segment {
				break
			}
			upTo := s.end
			if s.number == end.segment {
				upTo = min(upTo, end.offset)
			}
			switch {
			case upTo <= s.synced:
			case s.fault == nil:
				return false, nil
			case q.released.Before(s.last()):
				return true, &SyncError{Queue: q.name, Segment: s.number, Err: s.fault}
			}
		}
		return true, nil
	})
}

// await returns when durable, which is called with mu held, says that it is
// done. Whoever finds no fsync under way leads the next one, for all that was
// appended by then; the others wait for it to end. So an fsync serves all who
// came while the one before was under way, without a goroutine of its own.
func (q *Queue) await(limit uint64, durable func() (done bool, err error)) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for waited := false; ; waited = true {
		if q.closed {
			return ErrClosed
		}
		if done, err := durable(); done {
			return err
		}
		if !waited {
			q.stats.Syncs++
		}
		if q.syncing {
			q.syncDone.Wait()
		} else if err := q.lead(limit); err != nil {
			return err
		}
	}
}

// lead fsyncs all dirty segments up to a number, in order. The error is one of opening a
// file: nothing is known about it, and it may be tried again. An error of
// fsync is left in the segment.
// Requires: mu held, which it gives up for the time of I/O; not syncing.
func (q *Queue) lead(limit uint64) error {
	q.syncing = true
	type job struct {
		*segment
		end int64
	}
	var jobs []job
	for _, s := range q.segments[q.find(q.unsynced):] {
		if s.dirty() && s.number <= limit {
			s.users++
			jobs = append(jobs, job{s, s.end})
		}
	}
	placed := q.placed
	q.mu.Unlock()

	var err error
	if !placed { // the files are those of an earlier process, which may not have got there
		err = q.place(false)
	}
	for _, j := range jobs {
		if err == nil {
			err = q.sync(j.segment, j.end)
		}
		q.done(j.segment)
	}

	q.mu.Lock()
	if err == nil {
		q.placed = true
	} else {
		err = fmt.Errorf("sync queue %s: %w", q.name, err)
	}
	for _, s := range q.segments[q.find(q.unsynced):] {
		q.unsynced = s.number
		if s.dirty() {
			break
		}
	}
	q.syncing = false
	q.syncDone.Broadcast()
	return err
}

// sync fsyncs a segment, of which the caller knows that it has records up to
// end.
func (q *Queue) sync(s *segment, end int64) error {
	file, err := q.use(s)
	if err != nil {
		q.mu.Lock()
		defer q.mu.Unlock()
		if s.dropped {
			return nil // and deleted
		}
		return err
	}
	defer q.done(s)
	err = file.Sync()

	q.mu.Lock()
	q.stats.Fsyncs++
	if err == nil {
		s.synced = max(s.synced, end)
	} else {
		q.stats.SyncErrors++
		s.fault, s.shut = err, true
	}
	q.mu.Unlock()
	if err != nil {
		q.log.Error("records may not be durable: fsync failed", keyQueue, q.name, keyFile, segmentName(s.number),
			keyOffset, end, obs.KeyError, err)
	}
	return nil
}
