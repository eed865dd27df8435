package diskqueue

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"

	"github.com/srtm-io/srtm/internal/obs"
)

// Record is a record as it was appended.
type Record struct {
	// Data belongs to the caller. Records of one Read share memory: keeping one
	// keeps them all, up to the size that was read.
	Data []byte
	// End is the position after it: Release(End) says that it is done with.
	End Position
}

// readWindow bounds the memory that records of one Read share, unless a single
// record needs more.
const readWindow = 1 << 20

// Read appends to into the next unread records, in order, and steps over them.
// There are at most maxRecords, whose data is at most maxBytes in sum unless
// the first is longer. There may be fewer though more are unread, but none
// only when nothing is. It never waits for a record.
//
// An error of reading, of the system, steps over nothing. Damaged records are
// no error, but are skipped: see the package comment.
func (q *Queue) Read(maxRecords, maxBytes int, into []Record) ([]Record, error) {
	q.reading.Lock()
	defer q.reading.Unlock()
	for {
		q.mu.Lock()
		if q.closed {
			q.mu.Unlock()
			return into, ErrClosed
		}
		s, left := q.ahead()
		from := q.cursor
		var end int64
		var window int64
		if s != nil && maxRecords > 0 {
			q.resting = false
			end, window = s.end, s.window(maxRecords)
			s.users++
		}
		q.mu.Unlock()
		q.close(left...)
		if s == nil || maxRecords <= 0 {
			return into, nil
		}

		b := batch{layout: s.layout, from: from, end: end, records: maxRecords, bytes: maxBytes,
			window: int(min(window, int64(maxBytes)+int64(maxRecords)*recordExtra, readWindow))}
		got, err := q.readSegment(s, &b, into)
		q.done(s)

		q.mu.Lock()
		moved := q.cursor != from // by Rewind, Release or Empty: what was read may not be what is next
		if !moved && err == nil {
			q.cursor = b.next
			if b.next.offset == s.end && b.next.index != s.records { // some of it was skipped
				s.records = b.next.index
				q.sum()
			}
			q.stats.Read += uint64(len(got) - len(into))
			q.stats.ReadBytes += uint64(b.size)
		}
		if !moved && err != nil {
			q.stats.ReadErrors++
		}
		q.mu.Unlock()
		switch {
		case moved:
		case err != nil:
			return into, fmt.Errorf("read queue %s: %w", q.name, err)
		case len(got) > len(into):
			return got, nil
		}
	}
}

// ahead returns the segment that the cursor is in with something to read, or
// nil, having moved the cursor to it, and the files to close of those it left.
// Requires: mu held.
func (q *Queue) ahead() (*segment, []File) {
	var left []File
	for i := q.find(q.cursor.segment); i < len(q.segments); i++ {
		s := q.segments[i]
		if s.number > q.cursor.segment {
			old := q.segment(q.cursor.segment)
			q.cursor = start(s.number)
			if old != nil {
				if file := q.surplus(old); file != nil {
					left = append(left, file)
				}
			}
		}
		if q.cursor.offset < s.end {
			return s, left
		}
	}
	return nil, left
}

// batch is what one Read wants of a segment.
type batch struct {
	layout
	from           Position
	end            int64
	records, bytes int
	window         int

	// What it got.
	next Position // from, if there was nothing or an error
	size int64    // of the records, with what frames them
}

// readSegment reads records of s into into, stepping over damage only at the
// beginning, so that what is intact is handed on first.
func (q *Queue) readSegment(s *segment, b *batch, into []Record) ([]Record, error) {
	b.next = b.from
	file, err := q.use(s)
	if err != nil {
		return into, err
	}
	defer q.done(s)
	w := walker{layout: b.layout, r: file, off: b.from.offset, at: b.from.offset, end: b.end, window: b.window, keep: true}
	length := 0
	for n := 0; n < b.records; n++ {
		data, err := w.next()
		switch {
		case err == nil:
		case n > 0 || errors.Is(err, io.EOF):
			return into, nil
		case errors.Is(err, errDamaged):
			at, found, err := b.search(file, w.off, b.end)
			if err != nil {
				return into, err
			}
			if found != certain {
				q.giveUp(s, b)
				return into, nil
			}
			q.quarantine(s, w.off, at-w.off)
			w.off = at
			b.next.offset = at
			n--
			continue
		default:
			return into, err
		}
		if length += len(data); n > 0 && length > b.bytes {
			return into, nil
		}
		b.size += w.off - b.next.offset
		b.next.offset = w.off
		b.next.index++
		into = append(into, Record{Data: data, End: b.next})
	}
	return into, nil
}

// Skip gives up what is unread of the segment that is to be read next, and
// returns how many bytes that is: for when Read returns an error again and
// again, since a disk that cannot read one place is no reason to read nothing
// more. It is not done on its own, since a disk that reads nothing for a minute
// is no reason to give up everything. The file is kept, as one with damage.
func (q *Queue) Skip() (bytes int64, err error) {
	q.reading.Lock()
	defer q.reading.Unlock()
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return 0, ErrClosed
	}
	s, left := q.ahead()
	if s == nil {
		q.mu.Unlock()
		return 0, nil
	}
	b := batch{from: q.cursor, end: s.end}
	s.users++
	q.mu.Unlock()
	q.close(left...)
	q.giveUp(s, &b)
	q.done(s)
	return b.end - b.from.offset, nil
}

// giveUp ends a segment at b.from, after which nothing can be read. It does
// nothing if more was appended since: that may be readable.
func (q *Queue) giveUp(s *segment, b *batch) {
	q.mu.Lock()
	s.shut = true
	if s.end != b.end || s.dropped {
		q.mu.Unlock()
		return
	}
	s.end, s.records = b.from.offset, b.from.index
	q.sum()
	q.mu.Unlock()
	q.quarantine(s, b.from.offset, b.end-b.from.offset)
}

// sum computes first of all segments.
// Requires: mu held.
func (q *Queue) sum() {
	for i, s := range q.segments {
		if i > 0 {
			s.first = q.segments[i-1].total()
		}
	}
}

// lostFrom returns the entry of lost for a segment, or nil.
// Requires: mu held.
func (q *Queue) lostFrom(segment uint64) *Position {
	for i := range q.lost {
		if q.lost[i].segment == segment {
			return &q.lost[i]
		}
	}
	return nil
}

// quarantine counts and logs damage to a segment, ends appending to it, and
// renames its file, which is not deleted when the records in it are done with.
func (q *Queue) quarantine(s *segment, off, bytes int64) {
	q.mu.Lock()
	s.shut = true
	first := !s.damaged
	s.damaged = true
	if first {
		q.stats.Quarantined++
	}
	q.stats.LostBytes += uint64(bytes)
	if !s.old && s.synced < off+bytes && q.lostFrom(s.number) == nil {
		// SyncTo and Sync have to say so even after the segment is gone.
		q.lost = append(q.lost, Position{segment: s.number, offset: s.synced})
	}
	rename := !s.bad && !s.dropped
	from := segmentName(s.number)
	q.mu.Unlock()

	level := slog.LevelError
	if !first {
		level = slog.LevelDebug // one line for each segment, however many gaps it has
	}
	q.log.Log(context.Background(), level, "records of a segment are damaged and are skipped; its file is kept", keyQueue, q.name,
		keyFile, from+badSuffix, keyOffset, off, keyBytes, bytes)
	if !rename {
		return
	}
	err := q.disk.Rename(filepath.Join(q.folder, from), filepath.Join(q.folder, from+badSuffix))
	q.mu.Lock()
	if err == nil {
		s.bad = true
	} else {
		q.stats.KeepErrors++
	}
	q.mu.Unlock()
	if err != nil {
		q.log.Error("damaged segment could not be renamed", keyQueue, q.name, keyFile, from, obs.KeyError, err)
	}
}
