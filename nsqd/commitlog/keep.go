package commitlog

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
)

// keptSuffix replaces badSuffix, after the number of unreadable records, once the other records
// are no longer needed.
const keptSuffix = ".kept"

func (s *segment) keptName() string {
	return fmt.Sprintf("%s.%d%s", segmentName(s.base), s.lost, keptSuffix)
}

// keptRecords returns the number in a keptName, or 1 for another name.
func keptRecords(name string) uint64 {
	_, number, _ := strings.Cut(strings.TrimSuffix(name, keptSuffix), segmentSuffix+".")
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return 1
	}
	return n
}

// Trim implements Log. If no record is needed any more, and a snapshot of cursors saved since the
// last Append holds the next offset, Trim deletes all segments.
func (l *Files) Trim(before Offset) error {
	l.mu.Lock()
	l.trimmed = max(l.trimmed, min(before, l.next))
	all := l.spentLocked()
	l.mu.Unlock()
	if all { // the active segment, too
		l.appending.Lock()
		defer l.appending.Unlock()
	}
	l.keeping.Lock()
	defer l.keeping.Unlock()
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if err := l.free(all); err != nil {
		return fmt.Errorf("trim log %s: %w", l.cfg.Name, err)
	}
	return nil
}

// spentLocked reports whether no segment is needed, not even for the next offset. Requires: mu
// held.
func (l *Files) spentLocked() bool {
	return len(l.segments.all) > 0 && l.trimmed >= l.next && l.savedNext >= l.next
}

// free deletes the trimmed segments that need not be retained. With all, free also deletes the
// last segment if it is not needed. If a file cannot be deleted, the next Open finds it and a
// later Trim deletes it. Requires: keeping held; with all, also appending.
func (l *Files) free(all bool) error {
	l.mu.Lock()
	all = all && l.spentLocked()
	end := len(l.segments.all)
	if !all {
		end-- // its name and its content give the next offset
	}
	if end < 1 || l.segments.all[0].next > l.trimmed {
		l.mu.Unlock()
		return nil // most of the time
	}
	retain := l.retain
	l.mu.Unlock()
	now := l.cfg.Now()

	l.mu.Lock()
	n, left := 0, l.segments.bytes
	var doomed []string
	var kept []*segment
	for ; n < end; n++ {
		s := l.segments.all[n]
		stays := (retain.Age > 0 || retain.Bytes > 0) &&
			(retain.Age == 0 || time.Duration(now-l.segments.dated(n, now)) <= retain.Age) && (retain.Bytes == 0 || left-s.size() < retain.Bytes)
		if s.next > l.trimmed || stays {
			break
		}
		left -= s.size()
		if s.bad {
			kept = append(kept, s)
		} else {
			doomed = append(doomed, s.name())
		}
	}
	files := l.segments.drop(n)
	l.kept += len(kept)
	l.stats.Trimmed += uint64(n)
	l.mu.Unlock()
	closeAll(files...)
	for _, s := range kept {
		if err := l.folder.disk.Rename(l.folder.file(s.name()), l.folder.file(s.keptName())); err != nil { // it comes again at the next start
			l.cfg.Log.Warn("cannot rename a damaged segment", keyLog, l.cfg.Name, keyFile, s.name(), obs.KeyError, err)
		}
	}
	return l.delete(doomed)
}

func (l *Files) delete(names []string) error {
	faults := l.folder.delete(names)
	if len(faults) > 0 {
		l.mu.Lock()
		l.stats.KeepErrors += uint64(len(faults))
		l.mu.Unlock()
	}
	return errors.Join(faults...)
}

// SaveCursors implements Log.
func (l *Files) SaveCursors(b []byte) error {
	l.keeping.Lock()
	defer l.keeping.Unlock()
	return l.saveCursors(b)
}

// saveCursors is SaveCursors. Requires: keeping held.
func (l *Files) saveCursors(b []byte) error {
	l.mu.Lock()
	next, found, closed := l.next, l.found, l.closed
	l.mu.Unlock()
	if closed {
		return ErrClosed
	}
	if len(b) > maxRecordLimit {
		return fmt.Errorf("save cursors of log %s: %w: %d bytes, allowed are %d", l.cfg.Name, ErrRecord, len(b), maxRecordLimit)
	}
	size, err := l.snapshots.save(b, next, found)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil { // the next save uses the same file, because the other file has the last snapshot
		l.stats.KeepErrors++
		return fmt.Errorf("save cursors of log %s: %w", l.cfg.Name, noSpace(err))
	}
	l.stats.Saves++
	l.stats.SavedBytes += uint64(size)
	l.savedNext = next
	return nil
}

// FoundCursors saves a snapshot unless the log has an intact snapshot. A log with a snapshot is
// distinguishable from a folder that lost its files.
func (l *Files) FoundCursors(b []byte) error {
	l.keeping.Lock()
	defer l.keeping.Unlock()
	if l.snapshots.saved > 0 {
		return nil
	}
	return l.saveCursors(b)
}

// LoadCursors implements Log.
func (l *Files) LoadCursors() ([]byte, error) {
	l.keeping.Lock()
	defer l.keeping.Unlock()
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	b, err := l.snapshots.last()
	if err != nil {
		return nil, fmt.Errorf("load cursors of log %s: %w", l.cfg.Name, err)
	}
	return b, nil
}
