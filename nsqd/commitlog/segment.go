package commitlog

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sort"
	"strconv"
	"strings"
)

const (
	segmentSuffix = ".seg"
	badSuffix     = ".bad" // after segmentSuffix: some of the file is unreadable
	newSuffix     = ".new" // of any incomplete file
)

// markEvery is the minimum distance between marks in a segment, in bytes. A Read that begins
// between two marks skips at most the records between them.
const markEvery = 256 << 10

// mark is the place of a record. A mark takes 16 bytes for 256 KiB on disk.
type mark struct {
	offset Offset
	at     int64
}

// gap is an unreadable part of a segment's file.
type gap struct{ at, size int64 }

func total(gaps []gap) (bytes int64) {
	for _, g := range gaps {
		bytes += g.size
	}
	return bytes
}

// segment is one file of a log.
type segment struct {
	// Set once.
	identity
	layout
	old    bool // of an earlier process
	sealed bool // had a footer when it was opened
	// attributes permits records with attributes, in a segment of this process.
	attributes bool

	// Guarded by Files.appending.
	ragged   bool  // there may be bytes after end, from a failed Append or reserve
	marked   int64 // place of the last mark made by an Append
	reserved int64 // end of the zeros written ahead

	// Guarded by Files.mu. end and the extent grow only under Files.appending.
	extent
	end     int64  // after the last record
	durable Offset // earlier records are on stable storage
	fault   error  // of an fsync: the records after durable may or may not be durable, and no later fsync can show this
	shut    bool   // takes no more records
	damaged bool   // some of the file was unreadable
	bad     bool   // the file has badSuffix
	gaps    []gap  // damaged places whose records were counted
	lost    int64  // minimum number of unreadable records
	marks   []mark // ascending
	file    File   // nil: not open
	users   int    // operations under way that keep file open
	dropped bool   // removed from the log: close the file after its last user
}

// dirty reports whether an fsync would make more records durable.
func (s *segment) dirty() bool { return s.fault == nil && s.durable < s.next }

// size returns the segment's size on disk, without a footer.
func (s *segment) size() int64 { return s.end }

// noted adds a mark if it is far enough from the other marks. Requires: Files.mu held.
func (s *segment) noted(m mark) {
	i, _ := slices.BinarySearchFunc(s.marks, m.at, func(o mark, at int64) int { return cmp.Compare(o.at, at) })
	before, after := s.from, int64(math.MaxInt64)
	if i > 0 {
		before = s.marks[i-1].at
	}
	if i < len(s.marks) {
		after = s.marks[i].at
	}
	if m.at-before >= markEvery && after-m.at >= markEvery {
		s.marks = slices.Insert(s.marks, i, m)
	}
}

// placeBefore returns a place at or before the record with offset o. Requires: Files.mu held.
func (s *segment) placeBefore(o Offset) int64 {
	i := sort.Search(len(s.marks), func(i int) bool { return s.marks[i].offset > o })
	if i == 0 {
		return s.from
	}
	return s.marks[i-1].at
}

func segmentName(base Offset) string { return fmt.Sprintf("%020d%s", uint64(base), segmentSuffix) }

func (s *segment) name() string {
	if s.bad {
		return segmentName(s.base) + badSuffix
	}
	return segmentName(s.base)
}

// parseSegmentName is the inverse of name.
func parseSegmentName(name string) (base Offset, bad, ok bool) {
	name, bad = strings.CutSuffix(name, badSuffix)
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok || len(digits) != 20 || strings.Trim(digits, "0123456789") != "" {
		return 0, false, false
	}
	number, err := strconv.ParseUint(digits, 10, 64)
	return Offset(number), bad, err == nil
}

// use returns the open file of s and keeps it open until done. After an error the caller must not
// call done.
func (l *Files) use(s *segment) (File, error) {
	l.mu.Lock()
	s.users++
	file := s.file
	if file != nil {
		l.mu.Unlock()
		return file, nil
	}
	name := s.name()
	l.mu.Unlock()

	opened, err := l.folder.disk.Open(l.folder.file(name))
	if err != nil {
		l.done(s)
		return nil, err
	}
	l.mu.Lock()
	file = s.file
	if file == nil {
		s.file = opened
		l.mu.Unlock()
		l.cfg.Dir.opened(l)
		return opened, nil
	}
	l.mu.Unlock()
	closeAll(opened) // another goroutine opened it in the meantime
	return file, nil
}

// done ends a use, and closes the file if a further use is unlikely.
func (l *Files) done(s *segment) {
	l.mu.Lock()
	s.users--
	file := l.segments.surplus(s)
	l.mu.Unlock()
	closeAll(file)
}

// closeAll closes files without a sync. A close error would be a write error, and no writes are
// pending.
func closeAll(files ...File) {
	for _, file := range files {
		if file != nil {
			_ = file.Close()
		}
	}
}
