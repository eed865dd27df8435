package diskqueue

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/srtm-io/srtm/internal/obs"
)

// Release says that the records before p are done with: they are not read
// again, after a Rewind for instance. It writes nothing: Checkpoint makes it
// last, and deletes the files that are done with. A p that is not after the
// one before, or is not in the queue any more, changes nothing.
func (q *Queue) Release(p Position) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if s := q.segment(p.segment); s != nil && s.damaged && s.last().Before(p) {
		p = s.last() // it was read before the rest of the segment was given up
	}
	if q.closed || q.last().Before(p) {
		return
	}
	q.released = maxPosition(q.released, p)
	q.cursor = maxPosition(q.cursor, p)
}

// Rewind makes Read start again at the first record that is not released.
func (q *Queue) Rewind() {
	q.mu.Lock()
	q.cursor = q.released
	left := q.stale()
	q.mu.Unlock()
	q.close(left...)
}

// stale takes out the files that need not be open any more.
// Requires: mu held.
func (q *Queue) stale() []File {
	var files []File
	for _, s := range q.segments {
		if file := q.surplus(s); file != nil {
			files = append(files, file)
		}
	}
	return files
}

// Checkpoint makes durable what is released, so that it is not read again
// after the queue is reopened, and deletes the segments in which nothing else
// is left: call it from time to time. When nothing was appended since the last
// one, it closes the queue's files, or deletes all segments if nothing is left
// in any.
//
// After an error nothing is worse than before; the next one tries again.
func (q *Queue) Checkpoint() error {
	q.keeping.Lock()
	defer q.keeping.Unlock()
	q.mu.Lock()
	closed := q.closed
	q.mu.Unlock()
	if closed {
		return ErrClosed
	}
	q.rest()
	if err := q.checkpoint(); err != nil {
		return fmt.Errorf("checkpoint queue %s: %w", q.name, err)
	}
	return nil
}

// rest gives back what a queue that is not appended to need not hold.
// Requires: keeping held.
func (q *Queue) rest() {
	if !q.appending.TryLock() { // the order of locks forbids to wait; and it is appended to
		return
	}
	defer q.appending.Unlock()

	q.mu.Lock()
	idle := q.atRest == q.stats.Appended
	q.atRest = q.stats.Appended
	if !idle {
		q.mu.Unlock()
		return
	}
	end := q.last()
	if q.upTo(q.released) == q.total() && !q.keepLast {
		q.shut() // for checkpoint to delete it
		end = Position{}
	}
	q.mu.Unlock()

	_ = q.SyncTo(end) // a file is not closed before; an error concerns those who ask for it, and was logged
	q.mu.Lock()
	q.resting = true
	files := q.stale()
	q.mu.Unlock()
	q.close(files...)
}

// checkpoint writes the cursor file if it has to change, and deletes what is
// before it. The file goes first: the segments from the cursor on are always
// complete, so that one which is not there is known to be lost.
// Requires: keeping held.
func (q *Queue) checkpoint() error {
	q.mu.Lock()
	to := q.released
	for _, s := range q.segments[q.find(to.segment):] {
		to = maxPosition(to, start(s.number))
		if s == q.active || to.offset < s.end || q.keepLast && s == q.segments[len(q.segments)-1] {
			break
		}
		to = start(s.number + 1)
	}
	kept := q.kept
	q.mu.Unlock()
	if !kept.Before(to) {
		return nil
	}

	err := q.keep(to)
	if errors.Is(err, ErrNoSpace) {
		// A full disk must not be the reason why nothing is deleted.
		if err := q.deleteBefore(to.segment); err != nil {
			return err
		}
		err = q.keep(to)
	}
	if err != nil {
		return err
	}
	return q.deleteBefore(to.segment)
}

// keep replaces the cursor file.
// Requires: keeping held.
func (q *Queue) keep(p Position) error {
	err := q.writeCursor(appendCursor(nil, p))
	q.mu.Lock()
	defer q.mu.Unlock()
	if err != nil {
		q.stats.KeepErrors++
		return fmt.Errorf("write cursor: %w", noSpace(err))
	}
	q.stats.Checkpoints++
	q.kept = p
	return nil
}

func (q *Queue) writeCursor(b []byte) error {
	path := filepath.Join(q.folder, cursorName)
	temp := path + newSuffix
	file, err := q.create(temp)
	if err != nil {
		return err
	}
	if err = writeAll(file, b, 0); err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = q.disk.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, q.disk.Remove(temp))
	}
	return q.disk.SyncDir(q.folder)
}

// deleteBefore drops the segments with lower numbers and deletes their files.
// A file that cannot be deleted is, when the queue is opened again.
// Requires: keeping held.
func (q *Queue) deleteBefore(number uint64) error {
	q.mu.Lock()
	n := q.find(number)
	var doomed []string
	for _, s := range q.segments[:n] {
		if !s.bad {
			doomed = append(doomed, s.name())
		}
	}
	files := q.drop(n)
	q.mu.Unlock()
	q.close(files...)
	return q.delete(doomed)
}

// delete deletes files of the queue.
func (q *Queue) delete(names []string) error {
	if len(names) == 0 {
		return nil
	}
	var faults []error
	for _, name := range names {
		if err := q.disk.Remove(filepath.Join(q.folder, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			faults = append(faults, err)
		}
	}
	if err := q.disk.SyncDir(q.folder); err != nil {
		faults = append(faults, err)
	}
	if len(faults) > 0 {
		q.mu.Lock()
		q.stats.KeepErrors += uint64(len(faults))
		q.mu.Unlock()
	}
	return errors.Join(faults...)
}

// loadCursor reads the cursor file. Without one, or when it is damaged,
// everything is read again.
func (q *Queue) loadCursor() (Position, error) {
	file, err := q.disk.Open(filepath.Join(q.folder, cursorName))
	if errors.Is(err, fs.ErrNotExist) {
		return Position{}, nil
	}
	if err != nil {
		return Position{}, err
	}
	b := make([]byte, cursorSize+1)
	n, err := readFull(file, b, 0)
	if err = errors.Join(err, file.Close()); err != nil {
		return Position{}, err
	}
	p, ok, err := parseCursor(b[:n])
	if err != nil {
		return Position{}, fmt.Errorf("%s: %w", cursorName, err)
	}
	if !ok {
		err := q.disk.Rename(filepath.Join(q.folder, cursorName), filepath.Join(q.folder, cursorName+badSuffix))
		q.stats.KeepErrors++
		q.log.Error("cursor file is damaged: all records in the queue's files are read again", keyQueue, q.name,
			keyFile, cursorName+badSuffix, obs.KeyError, err)
		if err != nil {
			return Position{}, err
		}
		return Position{}, nil
	}
	return p, nil
}
