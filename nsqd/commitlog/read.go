package commitlog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
)

// Bounds of one read call, in bytes. A single record may need more.
const (
	readWindow = 1 << 20
	minRead    = 16 << 10
)

// Read implements Log. It skips damaged records without an error: see Files.
func (l *Files) Read(from Offset, limit Limit, into *Batch) error {
	l.cfg.Dir.spare()
	l.reading.Lock()
	defer l.reading.Unlock()
	hint := l.ends.of(from)
	into.Records, into.Next = into.Records[:0], from
	limit.Records, limit.Bytes = max(1, limit.Records), max(1, limit.Bytes)
	for {
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			return ErrClosed
		}
		s := (*segment)(nil)
		for i := l.segments.at(from); i < len(l.segments.all); i++ {
			if l.segments.all[i].end > headerSize && l.segments.all[i].records > 0 {
				s = l.segments.all[i]
				break
			}
		}
		if s == nil {
			l.mu.Unlock()
			return nil
		}
		c := cut{layout: s.layout, base: s.base, from: from, at: s.placeBefore(from), end: s.end, limit: limit}
		if hint.segment == s && hint.offset == from && hint.at > c.at {
			c.at = hint.at
		}
		c.window = s.window(limit)
		next := s.next
		s.users++
		l.segments.resting = false
		left := l.segments.warm(s)
		l.mu.Unlock()
		closeAll(left)

		err := l.readSegment(s, &c, into)
		l.done(s)

		l.mu.Lock()
		if err != nil {
			l.stats.ReadErrors++
		} else if c.reached > 0 && !s.dropped {
			s.noted(mark{c.reached, c.at})
		}
		for i := range into.Records {
			l.stats.ReadBytes += uint64(len(into.Records[i].Body))
		}
		l.stats.Read += uint64(len(into.Records))
		l.mu.Unlock()
		switch {
		case err != nil:
			into.Records = into.Records[:0]
			return fmt.Errorf("read log %s: %w", l.cfg.Name, err)
		case len(into.Records) > 0:
			into.Next = into.Records[len(into.Records)-1].Offset + 1
			*hint = reached{s, mark{into.Next, c.at}}
			return nil
		}
		// The rest of the segment is unreadable.
		from = max(from, next)
	}
}

// reached is the end of a Read, for the Read that continues there.
type reached struct {
	segment *segment
	mark
}

// ends remembers the ends of recent Reads, so several cursors may read in turn.
type ends struct {
	places [8]reached
	last   int // index of the last noted place
}

// of returns the place noted for an offset, or else a place to note it in.
func (e *ends) of(o Offset) *reached {
	for i := range e.places {
		if p := &e.places[i]; p.segment != nil && p.offset == o {
			return p
		}
	}
	e.last = (e.last + 1) % len(e.places)
	return &e.places[e.last]
}

// window returns how many bytes to read at a time for the given limit.
func (s *segment) window(limit Limit) int {
	average := (s.end-headerSize)/max(1, s.records) + 1
	want := int64(math.MaxInt64)
	if int64(limit.Records) < want/average {
		want = average * int64(limit.Records)
	}
	if int64(limit.Bytes) < math.MaxInt64/2 {
		want = min(want, int64(limit.Bytes)+int64(limit.Bytes)/max(1, average-recordExtra-dataHeader)*(recordExtra+dataHeader))
	}
	return int(min(max(want, minRead), readWindow))
}

// cut is the part of a segment that one Read wants.
type cut struct {
	layout
	base   Offset
	from   Offset
	end    int64
	limit  Limit
	window int

	// Progress.
	at      int64  // place of the next record
	reached Offset // minimum offset of the next record
}

// readSegment reads records of s. It skips damage only at the beginning, so the records before
// damage are returned first.
func (l *Files) readSegment(s *segment, c *cut, into *Batch) error {
	file, err := l.use(s)
	if err != nil {
		return err
	}
	defer l.done(s)
	w := walker{layout: c.layout, r: file, off: c.at, at: c.at, end: c.end, window: c.window, batch: into}
	for size := 0; len(into.Records) < c.limit.Records; {
		before := w.off
		data, err := w.next()
		n := len(into.Records)
		switch {
		case err == nil:
		case n > 0 || errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, errDamaged):
			if err := l.survey(s, file, w.off); err != nil {
				return err
			}
			at, found, err := c.search(file, w.off, c.end)
			if err != nil {
				return err
			}
			if found != certain {
				l.giveUp(s, w.off, c.end)
				return nil
			}
			l.quarantine(s, w.off, at-w.off)
			w.off, c.at = at, at
			continue
		default:
			return err
		}
		if n == cap(into.Records) {
			into.Records = append(into.Records, Record{})
		}
		into.Records = into.Records[:n+1]
		r := &into.Records[n]
		if !ParseData(data, c.base, r) {
			into.Records = into.Records[:n]
			if n > 0 {
				w.off = before
				return nil
			}
			if err := l.survey(s, file, before); err != nil {
				return err
			}
			l.quarantine(s, before, w.off-before) // intact bytes that are not a valid record
			c.at = w.off
			continue
		}
		if r.Offset < c.from {
			into.Records = into.Records[:n]
			c.at, c.reached = w.off, r.Offset+1
			continue
		}
		if size += len(r.Body) + len(r.Attribute); n > 0 && size > c.limit.Bytes {
			into.Records = into.Records[:n]
			return nil
		}
		w.fixed = true
		c.at, c.reached = w.off, r.Offset+1
	}
	return nil
}

// giveUp ends a segment at a place without readable records behind it. If the segment has grown
// beyond end, giveUp does nothing, because the new records may be readable.
func (l *Files) giveUp(s *segment, at, end int64) {
	l.mu.Lock()
	s.shut = true
	if s.end != end || s.dropped {
		l.mu.Unlock()
		return
	}
	l.segments.bytes -= s.end - at
	s.end = at
	l.mu.Unlock()
	l.quarantine(s, at, end-at)
}

// At returns the offset of the first record in the log's order whose Timestamp is t or later, or
// the next offset.
func (l *Files) At(t mono.Wall) (Offset, error) {
	l.mu.Lock()
	from, next, closed := l.next, l.next, l.closed
	for _, s := range l.segments.all {
		if s.records > 0 && s.last >= t {
			from = s.base
			break
		}
	}
	l.mu.Unlock()
	if closed {
		return 0, ErrClosed
	}
	var b Batch
	for b.Next = from; b.Next < next; {
		if err := l.Read(b.Next, Limit{Records: 1 << 10, Bytes: readWindow}, &b); err != nil {
			return 0, err
		}
		if len(b.Records) == 0 {
			break
		}
		for i := range b.Records {
			if b.Records[i].Timestamp >= t {
				return b.Records[i].Offset, nil
			}
		}
	}
	return next, nil
}

// survey counts the unreadable records of a segment if the damage at a place is new. It reads the
// whole segment. Requires: reading held.
func (l *Files) survey(s *segment, file File, at int64) error {
	l.mu.Lock()
	known := slices.ContainsFunc(s.gaps, func(g gap) bool { return g.at <= at && at < g.at+g.size })
	end, next, records := s.end, s.next, s.records
	l.mu.Unlock()
	if known {
		return nil
	}
	f, err := s.layout.survey(file, s.base, next, end)
	if err != nil {
		return err
	}
	if f.end < end {
		f.gaps = append(f.gaps, gap{f.end, end - f.end})
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s.records -= records - f.records // an Append may have added records meanwhile
	s.lose(max(1, records-f.records), f.gaps, &l.stats)
	return nil
}

// lose adds unreadable records to the segment and to its log's statistics, and replaces the list
// of gaps. Requires: the log's mu held, or no other goroutine knows the log.
func (s *segment) lose(records int64, gaps []gap, stats *Stats) {
	stats.Unreadable += uint64(records)
	stats.LostBytes += uint64(max(0, total(gaps)-total(s.gaps)))
	s.lost, s.gaps = s.lost+records, gaps
}

// quarantine counts and logs damage to a segment, stops appending to it, and renames its file.
// Trim does not delete the file.
func (l *Files) quarantine(s *segment, off, bytes int64) {
	l.mu.Lock()
	s.shut = true
	first := !s.damaged
	s.damaged = true
	if first {
		l.stats.Quarantined++
	}
	if !s.old && s.durable < s.next && s.fault == nil {
		s.fault = errDamaged // not durable and never will be: Sync must report it
	}
	rename := !s.bad && !s.dropped
	from := segmentName(s.base)
	l.mu.Unlock()

	level := slog.LevelError
	if !first {
		level = slog.LevelDebug // one line for each segment, however many gaps it has
	}
	l.cfg.Log.Log(context.Background(), level, "records of a segment are damaged and are skipped; its file is kept", keyLog, l.cfg.Name,
		keyFile, from+badSuffix, keyOffset, off, keyBytes, bytes)
	if !rename {
		return
	}
	err := l.folder.disk.Rename(l.folder.file(from), l.folder.file(from+badSuffix))
	l.mu.Lock()
	if err == nil {
		s.bad = true
	} else {
		l.stats.KeepErrors++
	}
	l.mu.Unlock()
	if err != nil {
		l.cfg.Log.Error("cannot rename a damaged segment", keyLog, l.cfg.Name, keyFile, from, obs.KeyError, err)
	}
}
