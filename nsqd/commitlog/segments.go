package commitlog

import (
	"cmp"
	"slices"
	"sort"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/mono"
)

// segments are those of a log, and which of their files stay open. Guarded by Files.mu.
//
// Invariant: bases ascend, and each segment's next is not above the base after
// it; all but active are shut; the log's next offset, or what it may be told from after a
// crash, is in the last one or in the snapshot of the cursors.
type segments struct {
	all     []*segment
	active  *segment   // the last of all, if it may be appended to
	bytes   int64      // of all
	resting bool       // nothing was appended or read since
	read    []*segment // Config.OpenFiles of them or nil, that were read last, the latest first

	files *atomic.Int64 // set once: Dir.files
}

// at returns the index of the first segment with an offset that is o or a later
// one: where to look for it.
func (l *segments) at(o Offset) int {
	return sort.Search(len(l.all), func(i int) bool { return l.all[i].next > o })
}

// drop takes the first n segments out of the log, and returns their files to be
// closed.
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

// lastBefore is the last segment that begins before an offset, or nil: what is before that
// segment was fsynced before it, or was in an error. One that was just begun may have no
// records yet.
func (l *segments) lastBefore(o Offset) *segment {
	i, _ := slices.BinarySearchFunc(l.all, o, func(s *segment, o Offset) int { return cmp.Compare(s.base, o) })
	if i == 0 {
		return nil
	}
	return l.all[i-1]
}

// shut ends appending to the active segment, which it returns, or nil.
// Requires: Files.appending held.
func (l *segments) shut() *segment {
	s := l.active
	if s != nil {
		s.shut = true
		l.active = nil
	}
	return s
}

// dated is the time of a segment's last record. One of the future, which a clock gave that
// was wrong then, is no later than what came after it, or would keep all of that, too.
func (l *segments) dated(i int, now mono.Wall) mono.Wall {
	for _, s := range l.all[i:] {
		if s.last <= now {
			return s.last
		}
	}
	return now
}

// warm says that s is being read, and returns the file to close of the one that
// was read least recently, if there are too many.
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

// surplus takes the file out of s if it need not stay open, for the caller to
// close; it stays open where the log is read or appended to, and as long as an
// fsync of what was written here is due: closing it could let the system forget that
// writing failed.
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
