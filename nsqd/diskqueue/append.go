package diskqueue

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"

	"github.com/srtm-io/srtm/internal/obs"
)

// Errors of Append that a caller may want to tell from others.
var (
	// ErrNoSpace says that the disk, or the quota on it, is full.
	ErrNoSpace = errors.New("no space on disk")
	// ErrRecordSize says that a record is empty or longer than Config.MaxRecord.
	ErrRecordSize = errors.New("invalid size of a record")
)

// noSpace adds ErrNoSpace to an error that means it.
func noSpace(err error) error {
	if isNoSpace(err) {
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return err
}

const (
	// maxUnsynced bounds the segments that are full and were never fsynced, and
	// are kept open because of it: when nobody calls Sync, the oldest is fsynced
	// before the next is begun. The system has long written it by then.
	maxUnsynced = 4

	// maxBuffer is the largest buffer that is kept for the next Append.
	maxBuffer = 8 << 20
)

// Append puts the records at the end, in one write, and returns the position
// after the last. When it fails nothing was appended, and a later call may
// succeed: after ErrNoSpace, when there is space again. Only if the machine
// stops just then might some of the first of them be found in the queue.
//
// The records are not durable before SyncTo or Sync. They are the caller's
// again when Append returns.
func (q *Queue) Append(records ...[]byte) (Position, error) {
	size := int64(0)
	for _, r := range records {
		if len(r) == 0 || len(r) > q.max {
			return Position{}, fmt.Errorf("append to queue %s: %w: %d bytes, allowed are 1 to %d", q.name, ErrRecordSize, len(r), q.max)
		}
		size += recordExtra + int64(len(r))
	}
	q.appending.Lock()
	defer q.appending.Unlock()

	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return Position{}, ErrClosed
	}
	if len(records) == 0 {
		defer q.mu.Unlock()
		return q.last(), nil
	}
	s := q.active
	if s != nil && (s.shut || s.end+size > q.limit && s.records > 0) {
		s = nil
	}
	q.resting = false
	var from int64
	if s != nil {
		from = s.end
	}
	q.mu.Unlock()

	buf := q.dir.buffers.Get().(*[]byte)
	defer func() {
		if cap(*buf) <= maxBuffer {
			q.dir.buffers.Put(buf)
		}
	}()
	var err error
	if s != nil {
		*buf = s.appendRecords((*buf)[:0], records, from)
		err = q.write(s, *buf, from)
	} else {
		s, err = q.begin(buf, records)
	}

	q.mu.Lock()
	defer q.mu.Unlock()
	if err != nil {
		if err = noSpace(err); errors.Is(err, ErrNoSpace) {
			q.stats.NoSpace++
		} else {
			q.stats.AppendErrors++
		}
		return Position{}, fmt.Errorf("append to queue %s: %w", q.name, err)
	}
	s.end = from + int64(len(*buf))
	s.records += int64(len(records))
	q.stats.Appended += uint64(len(records))
	q.stats.AppendedBytes += uint64(size)
	return s.last(), nil
}

// appendRecords appends the records; the first begins at offset off of the file.
func (l layout) appendRecords(dst []byte, records [][]byte, off int64) []byte {
	off -= int64(len(dst))
	for _, r := range records {
		dst = l.appendRecord(dst, r, off+int64(len(dst)))
	}
	return dst
}

// write writes b at the end of a segment, or leaves the segment as it was.
// Requires: appending held.
func (q *Queue) write(s *segment, b []byte, off int64) error {
	file, err := q.use(s)
	if err != nil {
		return err
	}
	defer q.done(s)
	if err = writeAll(file, b, off); err == nil {
		return nil
	}
	if cut := file.Truncate(off); cut != nil {
		// Readers do not look behind the end that they know, but the next record
		// has to go elsewhere.
		s.ragged = true
		q.mu.Lock()
		s.shut = true
		q.mu.Unlock()
		err = errors.Join(err, cut)
	}
	return err
}

func writeAll(file File, b []byte, off int64) error {
	n, err := file.WriteAt(b, off)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	return err
}

// begin starts a new active segment with the records, which *buf has after it.
//
// The file gets its name when it has its records: one that could be neither
// written nor deleted would bring back records of an Append that failed.
// Requires: appending held.
func (q *Queue) begin(buf *[]byte, records [][]byte) (*segment, error) {
	q.mu.Lock()
	number, placed := q.next, q.placed
	q.mu.Unlock()
	if !placed {
		if err := q.disk.Mkdir(q.folder); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	path := filepath.Join(q.folder, segmentName(number))
	file, err := q.create(path + newSuffix)
	if err != nil {
		return nil, err
	}
	id := identity{number: number, salt: q.dir.salt(), maxRecord: uint32(q.max)}
	s := &segment{identity: id, layout: id.layout(), file: file}
	*buf = s.appendRecords(appendHeader((*buf)[:0], id), records, headerSize)
	if err = writeAll(file, *buf, 0); err == nil {
		err = q.disk.Rename(path+newSuffix, path)
	}
	if err != nil {
		q.close(file)
		return nil, errors.Join(err, q.disk.Remove(path+newSuffix))
	}
	// If this fails, SyncTo tries again before it promises anything.
	unplaced := q.place(placed)

	q.mu.Lock()
	old := q.shut()
	s.end, s.first = headerSize, q.total()
	q.segments = append(q.segments, s)
	q.active = s
	q.next = number + 1
	q.placed = unplaced == nil
	if unplaced != nil {
		q.stats.KeepErrors++
	}
	q.mu.Unlock()
	if unplaced != nil {
		q.log.Warn("folder of a queue could not be synced", keyQueue, q.name, obs.KeyError, unplaced)
	}

	q.seal(old)
	q.trim()
	return s, nil
}

// create makes a file, in place of one that was left over.
func (q *Queue) create(path string) (File, error) {
	file, err := q.disk.Create(path)
	if errors.Is(err, fs.ErrExist) {
		if err = q.disk.Remove(path); err == nil {
			file, err = q.disk.Create(path)
		}
	}
	return file, err
}

// place makes it durable which files the queue has, and, unless that is known
// already, its folder.
func (q *Queue) place(placed bool) error {
	if !placed {
		if err := q.disk.SyncDir(q.dir.path); err != nil {
			return err
		}
	}
	return q.disk.SyncDir(q.folder)
}

// seal writes the footer of a segment that is shut. Without it, the segment is
// read when the queue is opened; so a failure is no more than logged.
// Requires: appending held.
func (q *Queue) seal(s *segment) {
	if s == nil {
		return
	}
	q.mu.Lock()
	id, end, records := s.identity, s.end, s.records
	trusted := s.fault == nil && !s.damaged
	q.mu.Unlock()
	if !trusted && !s.ragged {
		return
	}
	file, err := q.use(s)
	if err == nil {
		defer q.done(s)
		if s.ragged {
			err = file.Truncate(end)
		}
		if err == nil && trusted {
			err = finish(file, id, records, end)
		}
	}
	if err != nil {
		q.mu.Lock()
		q.stats.KeepErrors++
		q.mu.Unlock()
		q.log.Warn("segment stays without a footer", keyQueue, q.name, keyFile, segmentName(s.number), obs.KeyError, err)
	}
}

// finish writes a footer, or nothing.
func finish(file File, id identity, records, end int64) error {
	err := writeAll(file, appendFooter(nil, id, records, end), end)
	if err != nil {
		err = errors.Join(err, file.Truncate(end))
	}
	return err
}

// trim keeps the number of segments that were never fsynced in bounds. An
// error is kept for those whose records it concerns, and was logged.
// Requires: appending held.
func (q *Queue) trim() {
	q.mu.Lock()
	var oldest Position
	if i := len(q.segments) - 2 - maxUnsynced; i >= 0 && q.segments[i].dirty() {
		oldest = q.segments[i].last()
	}
	q.mu.Unlock()
	_ = q.syncTo(oldest, oldest.segment)
}
