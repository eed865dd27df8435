package commitlog

import (
	"fmt"

	"github.com/srtm-io/srtm/internal/obs"
)

// Sync implements Log. It waits for one fsync, rarely two: concurrent callers share them.
func (l *Files) Sync(upTo Offset) error { return l.syncTo(upTo, noSegment) }

// syncTo is Sync, limited to segments with a base of at most limit.
//
// A caller that finds no fsync under way leads the next fsync, for all records appended by then.
// The other callers wait for its end. So an fsync serves all callers that arrived during the
// previous fsync, without a goroutine.
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

// lead fsyncs all dirty segments with a base of at most limit, in order. If opening a file fails,
// lead returns the error, and the caller may retry. An fsync error is stored in the segment.
// Requires: mu held, which lead releases during I/O; not syncing.
func (l *Files) lead(limit Offset) error {
	l.syncing = true
	type job struct {
		segment *segment
		next    Offset
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
	if !found { // an earlier process may not have made the files of this folder durable
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

// sync fsyncs a segment. Requires: the segment has the records before next.
func (l *Files) sync(s *segment, next Offset) error {
	file, err := l.use(s)
	if err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		if s.dropped {
			return nil // the file was deleted
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
