package commitlog

import (
	"fmt"

	"github.com/srtm-io/srtm/internal/obs"
)

// Sync is of Log. It waits for one fsync, seldom two: the callers at any time share
// them.
func (l *Files) Sync(upTo Offset) error { return l.syncTo(upTo, noSegment) }

// syncTo is Sync, and fsyncs no segment with a base above limit.
//
// A caller that finds no fsync under way leads the next one, for all that was appended by
// then; the others wait for it to end. So an fsync serves all who came while the one
// before was under way, without a goroutine of its own.
func (l *Files) syncTo(upTo, limit Offset) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for waited := false; ; waited = true {
		if l.closed {
			return ErrClosed
		}
		s := l.segments.lastBefore(upTo)
		switch {
		case s == nil, s.durable >= min(upTo, s.next):
			return nil
		case s.fault != nil:
			return &SyncError{Log: l.cfg.Name, First: s.base, Err: s.fault}
		}
		if !waited {
			l.stats.Syncs++
		}
		if l.syncing {
			l.syncDone.Wait()
		} else if err := l.lead(limit); err != nil {
			return err
		}
	}
}

// lead fsyncs all dirty segments up to a base, in order. The error is one of opening
// a file: nothing is known about it, and it may be tried again. An error of fsync is
// left in the segment.
// Requires: mu held, which it gives up for the time of I/O; not syncing.
func (l *Files) lead(limit Offset) error {
	l.syncing = true
	type job struct {
		*segment
		next Offset
	}
	var few [2]job
	jobs := few[:0]
	for _, s := range l.segments.all[l.segments.at(l.unsynced):] {
		if s.dirty() && s.base <= limit {
			s.users++
			jobs = append(jobs, job{s, s.next})
		}
	}
	found := l.found
	l.mu.Unlock()

	var err error
	if !found { // the files are those of an earlier process, which may not have got there
		err = l.folder.place(false)
	}
	for _, j := range jobs {
		if err == nil {
			err = l.sync(j.segment, j.next)
		}
		l.done(j.segment)
	}

	l.mu.Lock()
	if err == nil {
		l.found = true
	} else {
		err = fmt.Errorf("sync log %s: %w", l.cfg.Name, err)
	}
	for _, s := range l.segments.all[l.segments.at(l.unsynced):] {
		l.unsynced = s.base
		if s.dirty() {
			break
		}
	}
	l.syncing = false
	l.syncDone.Broadcast()
	return err
}

// sync fsyncs a segment, of which the caller knows that it has the records before
// next.
func (l *Files) sync(s *segment, next Offset) error {
	file, err := l.use(s)
	if err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		if s.dropped {
			return nil // and deleted
		}
		return err
	}
	defer l.done(s)
	err = file.Sync()

	l.mu.Lock()
	l.stats.Fsyncs++
	if err == nil {
		s.durable = max(s.durable, next)
	} else {
		l.stats.SyncErrors++
		s.fault, s.shut = err, true
	}
	l.mu.Unlock()
	if err != nil {
		l.cfg.Log.Error("records may not be durable: fsync failed", keyLog, l.cfg.Name, keyFile, segmentName(s.base),
			keyOffset, uint64(next), obs.KeyError, err)
	}
	return nil
}
