package diskqueue

import (
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"
)

const (
	segmentSuffix = ".seg"
	badSuffix     = ".bad" // after segmentSuffix: some of it cannot be read
	newSuffix     = ".new" // of any file, until it is complete
	cursorName    = "cursor"
)

// segment is one file of a queue.
type segment struct {
	// Set once.
	identity
	layout
	old bool // of an earlier process

	// Guarded by Queue.appending.
	ragged bool // there may be bytes after end, of an Append that failed

	// Guarded by Queue.mu; end and records grow only under Queue.appending.
	end     int64 // offset after the last record
	records int64 // that can be read, as far as is known
	synced  int64 // what is before this offset is on stable storage
	fault   error // of an fsync: what is after synced may or may not be, and no later fsync can tell
	shut    bool  // nothing is appended any more
	damaged bool  // some of it could not be read
	bad     bool  // the file is named so
	first   total // what is before it in the queue
	file    File  // nil: not open
	users   int   // operations on file under way; it stays open
	dropped bool  // out of the queue: close the file after its last user
}

// total counts records, and their bytes in files. It only has a meaning
// relative to another total of the same queue.
type total struct{ records, bytes int64 }

func (t total) minus(o total) total { return total{t.records - o.records, t.bytes - o.bytes} }

// upTo is what is before a place in the segment.
func (s *segment) upTo(offset, index int64) total {
	return total{s.first.records + min(index, s.records), s.first.bytes + min(offset, s.end) - headerSize}
}

// total is what is before its end.
func (s *segment) total() total { return s.upTo(s.end, s.records) }

// last is the position after its last record.
func (s *segment) last() Position { return Position{s.number, s.end, s.records} }

// dirty reports whether an fsync would make more of it durable.
func (s *segment) dirty() bool { return s.fault == nil && s.synced < s.end }

// window estimates the bytes of so many records.
func (s *segment) window(records int) int64 {
	average := (s.end-headerSize)/max(1, s.records) + 1
	if int64(records) > math.MaxInt64/average {
		return math.MaxInt64
	}
	return average * int64(records)
}

func segmentName(number uint64) string { return fmt.Sprintf("%020d%s", number, segmentSuffix) }

func (s *segment) name() string {
	if s.bad {
		return segmentName(s.number) + badSuffix
	}
	return segmentName(s.number)
}

// parseSegmentName is the inverse of name.
func parseSegmentName(name string) (number uint64, bad, ok bool) {
	name, bad = strings.CutSuffix(name, badSuffix)
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok || len(digits) != 20 || strings.Trim(digits, "0123456789") != "" {
		return 0, false, false
	}
	number, err := strconv.ParseUint(digits, 10, 64)
	return number, bad, err == nil && number > 0
}

// use returns the file of s, opened if it was not, and keeps it open until
// done is called. An error needs no call of done.
func (q *Queue) use(s *segment) (File, error) {
	q.mu.Lock()
	s.users++
	file, name := s.file, s.name()
	q.mu.Unlock()
	if file != nil {
		return file, nil
	}

	opened, err := q.disk.Open(filepath.Join(q.folder, name))
	if err != nil {
		q.done(s)
		return nil, err
	}
	q.mu.Lock()
	file = s.file
	if file == nil {
		s.file = opened
		q.mu.Unlock()
		return opened, nil
	}
	q.mu.Unlock()
	q.close(opened) // another opened it in the meantime
	return file, nil
}

// done ends a use, and closes the file if nobody will want it soon.
func (q *Queue) done(s *segment) {
	q.mu.Lock()
	s.users--
	file := q.surplus(s)
	q.mu.Unlock()
	q.close(file)
}

// surplus takes the file out of s if it need not stay open, for the caller to
// close; it stays open where the queue is read or appended to, and as long as
// an fsync is due: closing it could let the system forget that writing failed.
// Requires: mu held.
func (q *Queue) surplus(s *segment) File {
	switch {
	case s.file == nil || s.users > 0:
		return nil
	case s.dropped:
	case s.dirty():
		return nil
	case (s == q.active || s.number == q.cursor.segment) && !q.resting:
		return nil
	}
	file := s.file
	s.file = nil
	return file
}

// close closes files that need no sync. An error would be one of writing, and
// there is nothing to write.
func (q *Queue) close(files ...File) {
	for _, file := range files {
		if file != nil {
			_ = file.Close()
		}
	}
}
