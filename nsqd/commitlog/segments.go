package commitlog

import (
	"cmp"
	"slices"
	"sort"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/mono"
)

// segments are the segments of a log, and the choice of files that stay open. Guarded by
// Files.mu.
//
// Invariant: bases ascend, and each segment's next is at most the next segment's base. All
// segments except active are shut. After a crash, the last segment or the snapshot of the cursors
// gives the log's next offset.
type segments struct {
	all     []*segment
	active  *segment   // the last of all, if it takes records
	bytes   int64      // of all segments
	resting bool       // no append and no read since Rest
	read    []*segment // Config.OpenFiles entries, segments or nil: the last read segments, latest first

	files *atomic.Int64 // set once: Dir.files
}

// at returns the index of the first segment that may have offset o or a later offset.
func (l *segments) at(o Offset) int {
	return sort.Search(len(l.all), func(i int) bool { return l.all[i].next > o })
}

// drop removes the first n segments from the log, and returns the files to close.
func (l *segments) drop(n int) []File {
	var files []File
	for _, s := range l.all[:n] {
		s.dropped = true
		l.bytes -= s.size()
		if s == l.active {
			l.active = nil
		}
		for i, other := range l.read {
			if other == s {
				l.read[i] = nil
			}
		}
		if file := l.surplus(s); file != nil {
			files = append(files, file)
		}
	}
	l.all = slices.Delete(l.all, 0, n)
	return files
}

// lastBefore returns the last segment that begins before an offset, or nil. All segments before
// it were fsynced first or have a failed fsync. A segment that has just begun may have no records
// yet.
func (l *segments) lastBefore(o Offset) *segment {
	i, _ := slices.BinarySearchFunc(l.all, o, func(s *segment, o Offset) int { return cmp.Compare(s.base, o) })
	if i == 0 {
		return nil
	}
	return l.all[i-1]
}

// shut stops appending to the active segment and returns the segment, or nil. Requires:
// Files.appending held.
func (l *segments) shut() *segment {
	s := l.active
	if s != nil {
		s.shut = true
		l.active = nil
	}
	return s
}

// dated returns the time of a segment's last record. If that time is in the future, because a
// clock was wrong, dated uses the time of a later segment. Otherwise the segment would keep all
// later segments, too.
func (l *segments) dated(i int, now mono.Wall) mono.Wall {
	for _, s := range l.all[i:] {
		if s.last <= now {
			return s.last
		}
	}
	return now
}

// warm records a read of s. If too many files are open, warm returns the least recently read file
// for the caller to close.
func (l *segments) warm(s *segment) File {
	at := len(l.read) - 1
	if i := slices.Index(l.read, s); i >= 0 {
		at = i
	}
	old := l.read[at]
	copy(l.read[1:at+1], l.read[:at])
	l.read[0] = s
	if old == nil || old == s {
		return nil
	}
	return l.surplus(old)
}

// surplus takes the file out of s, for the caller to close, unless the file must stay open. A
// file stays open while it is being read or appended to, and while an fsync of this process's
// writes is due. Closing earlier could let the system forget a write error.
func (l *segments) surplus(s *segment) File {
	switch {
	case s.file == nil || s.users > 0:
		return nil
	case s.dropped:
	case s.dirty() && !s.old:
		return nil
	case l.resting:
	case s == l.active, slices.Contains(l.read, s):
		return nil
	}
	file := s.file
	s.file = nil
	l.files.Add(-1)
	return file
}
