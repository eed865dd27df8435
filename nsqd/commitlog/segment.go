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
	badSuffix     = ".bad" // after segmentSuffix: some of it cannot be read
	newSuffix     = ".new" // of any file, until it is complete
)

// markEvery is how far it is, in bytes, from one place in a segment whose record's
// offset is known to the next: what a Read that begins anywhere has to step over.
const markEvery = 256 << 10

// mark is the place of a record. One takes 16 bytes for 256 KiB on disk.
type mark struct {
	offset Offset
	at     int64
}

// gap is a part of a segment's file that cannot be read.
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
	sealed bool // it had its footer when it was found

	// Guarded by Files.appending.
	ragged   bool  // there may be bytes after end, of an Append that failed or reserved
	marked   int64 // place of the last mark that an Append made
	reserved int64 // where the zeros after end that were written ahead end

	// Guarded by Files.mu; end and the extent grow only under Files.appending.
	extent
	end     int64  // after the last record
	durable Offset // the records before it are on stable storage
	fault   error  // of an fsync: what is after durable may or may not be, and no later fsync can tell
	shut    bool   // nothing is appended any more
	damaged bool   // some of it could not be read
	bad     bool   // the file is named so
	gaps    []gap  // places of damage, of which the records were counted
	lost    int64  // records that cannot be read, at least
	marks   []mark // ascending
	file    File   // nil: not open
	users   int    // operations on file under way; it stays open
	dropped bool   // out of the log: close the file after its last user
}

// dirty reports whether an fsync would make more of it durable.
func (s *segment) dirty() bool { return s.fault == nil && s.durable < s.next }

// size is what it takes of the disk, without a footer.
func (s *segment) size() int64 { return s.end }

// noted adds a mark if it is far enough from the others.
// Requires: Files.mu held.
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

// placeBefore returns a place that is not after that of an offset.
// Requires: Files.mu held.
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

// use returns the file of s, opened if it was not, and keeps it open until
// done is called. An error needs no call of done.
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
	closeAll(opened) // another opened it in the meantime
	return file, nil
}

// done ends a use, and closes the file if it is not likely to be used soon.
func (l *Files) done(s *segment) {
	l.mu.Lock()
	s.users--
	file := l.segments.surplus(s)
	l.mu.Unlock()
	closeAll(file)
}

// closeAll closes files that need no sync. An error would be one of writing, and
// there is nothing to write.
func closeAll(files ...File) {
	for _, file := range files {
		if file != nil {
			_ = file.Close()
		}
	}
}
