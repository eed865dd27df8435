package diskqueue

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/srtm-io/srtm/internal/obs"
)

// recover finds what is in the queue's folder. The rules:
//
//   - The cursor file says where to start. Segments before it were to be
//     deleted, and are. Without it everything is read, even what is quarantined
//     for long.
//   - A segment with a header and a footer is complete. Nothing else of it is
//     read.
//   - A segment without a footer is read to its end. If no intact record comes
//     after the first that is not, that is where a write was interrupted: the
//     file is cut there. Else it is damaged.
//   - A damaged segment is renamed .bad and left as it is. What can be read of
//     it is in the queue; after the cursor has passed it, it is left alone.
//   - None is appended to again, so that places in it keep their meaning.
//
// Requires: nobody else knows q.
func (q *Queue) recover() error {
	names, err := q.disk.List(q.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if q.kept, err = q.loadCursor(); err != nil {
		return err
	}
	q.released, q.cursor = q.kept, q.kept // may be after what is left of a segment

	numbers, bad, doomed := sortFiles(names, q.kept.segment)
	if len(doomed) > 0 {
		// The cursor that dooms them, before its consequences.
		if err := q.disk.SyncDir(q.folder); err != nil {
			return err
		}
		if err := q.delete(doomed); err != nil {
			return err
		}
	}
	if err := q.loadAll(numbers, bad); err != nil {
		return err
	}
	q.sum()
	for i, s := range q.segments {
		// What the last process did not fsync is among the last of them.
		if s.synced = s.end; i >= len(q.segments)-maxUnsynced-2 {
			s.synced = headerSize
		}
	}
	return nil
}

// sortFiles returns the numbers of segments from first on, in order, and which
// of them are bad; and the files that are to be deleted.
func sortFiles(names []string, first uint64) (numbers []uint64, bad map[uint64]bool, doomed []string) {
	bad = make(map[uint64]bool)
	for _, name := range names {
		number, isBad, ok := parseSegmentName(name)
		switch {
		case strings.HasSuffix(name, newSuffix), ok && number < first && !isBad:
			doomed = append(doomed, name)
		case ok && number >= first:
			if was, twice := bad[number]; twice {
				isBad = isBad && was
			}
			bad[number] = isBad
		}
	}
	return slices.Sorted(maps.Keys(bad)), bad, doomed
}

// loadAll loads the segments of these numbers, which ascend.
func (q *Queue) loadAll(numbers []uint64, bad map[uint64]bool) error {
	q.next = max(q.next, q.kept.segment)
	inside := q.kept.offset > headerSize // of a segment, which should be there
	expected := q.kept.segment
	if expected == 0 && len(numbers) > 0 {
		expected = numbers[0]
	}
	if inside && len(numbers) == 0 {
		q.missing(expected, expected+1)
	}
	var empty []string // files: the last ones of numbers
	for _, number := range numbers {
		if number > expected {
			q.missing(expected, number)
		}
		expected = number + 1
		s, err := q.load(number, bad[number])
		if err != nil {
			return fmt.Errorf("segment %d: %w", number, err)
		}
		switch {
		case s != nil:
			empty = nil
			q.next = max(q.next, number+1)
			if s.records > 0 {
				q.segments = append(q.segments, s)
			}
		case !inside || number != q.kept.segment:
			empty = append(empty, segmentName(number))
		}
	}
	if inside {
		q.next = max(q.next, q.kept.segment+1) // another of that number would be read from that offset
	}
	// Those that others come after stay, so that none is missing next time.
	return q.delete(empty)
}

// missing notes that segments are not there, from one number to before
// another.
func (q *Queue) missing(from, to uint64) {
	q.stats.Missing += to - from
	q.log.Warn("segments are missing: deleted while the disk was full, or lost", keyQueue, q.name,
		keyFile, segmentName(from), obs.KeyCount, to-from)
}

// load looks at a segment's file. It returns nil if the file is empty, or is
// now.
func (q *Queue) load(number uint64, bad bool) (*segment, error) {
	s := &segment{identity: identity{number: number}, old: true, shut: true, bad: bad, damaged: bad}
	file, err := q.disk.Open(filepath.Join(q.folder, s.name()))
	if err != nil {
		return nil, err
	}
	keep, err := q.inspect(s, file)
	if err = errors.Join(err, file.Close()); err != nil || !keep {
		return nil, err
	}
	return s, nil
}

// inspect fills s from its file, and reports whether there is anything in it,
// be it damaged; what is not worth keeping is cut off.
func (q *Queue) inspect(s *segment, file File) (bool, error) {
	size, err := file.Size()
	if err != nil {
		return false, err
	}
	k, err := identify(s.number, file, size)
	if err != nil {
		return false, err
	}
	if !k.header && !k.footer {
		empty, err := zeros(file, size)
		switch {
		case err != nil:
			return false, err
		case s.bad || size == 0:
		case size < headerSize || empty: // a segment that was just begun
			if err := file.Truncate(0); err != nil {
				return false, err
			}
			q.torn(s, 0, size)
		default:
			q.quarantine(s, 0, size)
		}
		return s.damaged, nil
	}
	s.identity, s.layout, s.end, s.records = k.identity, k.layout(), k.end, k.records
	if k.header && k.footer && !s.bad {
		return true, nil
	}

	f, err := s.survey(file, k.end)
	if err != nil {
		return false, err
	}
	s.end, s.records = f.end, f.records
	switch {
	case s.bad:
		if s.records > 0 {
			q.log.Warn("segment with damage is still to be read", keyQueue, q.name, keyFile, s.name(), keyRecords, s.records)
		}
	case !k.header:
		q.quarantine(s, 0, headerSize)
	case f.skipped > 0:
		q.quarantine(s, headerSize, f.skipped)
	case f.rest != nothing:
		q.quarantine(s, f.end, k.end-f.end)
	default:
		cut := f.end
		if s.records == 0 {
			cut = 0
		}
		if cut < size {
			if err := file.Truncate(cut); err != nil {
				return false, err
			}
			q.torn(s, cut, size-cut)
		}
		if s.records > 0 {
			// Only spares the next opening what this one had to do.
			_ = finish(file, s.identity, s.records, s.end)
		}
	}
	return s.records > 0 || s.damaged, nil
}

// known is what a segment's header and footer tell.
type known struct {
	header, footer bool // which of them is intact; else that of the other holds
	identity
	end     int64 // where the records end, or at least the file
	records int64 // if there is a footer
}

// identify reads the header and the footer of the segment of that number.
func identify(number uint64, file File, size int64) (known, error) {
	k := known{end: size}
	if size < headerSize {
		return k, nil
	}
	head := make([]byte, headerSize)
	if _, err := readFull(file, head, 0); err != nil {
		return k, err
	}
	id, ok, err := parseHeader(head)
	if err != nil {
		return k, err
	}
	if ok && id.number == number {
		k.header, k.identity = true, id
	}
	at := size - footerSize
	if at < headerSize {
		return k, nil
	}
	foot := make([]byte, footerSize)
	if _, err := readFull(file, foot, at); err != nil {
		return k, err
	}
	id, records, ok := parseFooter(foot, at)
	if ok && id.number == number && (!k.header || k.identity == id) {
		k.footer, k.identity, k.end, k.records = true, id, at, records
	}
	return k, nil
}

// torn notes that a segment's file was cut at off.
func (q *Queue) torn(s *segment, off, bytes int64) {
	q.stats.Torn++
	q.stats.TornBytes += uint64(bytes)
	q.log.Warn("end of a segment was not written whole, and is cut", keyQueue, q.name, keyFile, s.name(), keyOffset, off, keyBytes, bytes)
}

// zeros reports whether the file holds nothing else.
func zeros(file File, size int64) (bool, error) {
	b := make([]byte, 64<<10)
	zero := make([]byte, len(b))
	for off := int64(0); off < size; {
		n, err := file.ReadAt(b[:min(size-off, int64(len(b)))], off)
		if err != nil && !errors.Is(err, io.EOF) {
			return false, err
		}
		if n == 0 {
			break
		}
		if !bytes.Equal(b[:n], zero[:n]) {
			return false, nil
		}
		off += int64(n)
	}
	return true, nil
}
