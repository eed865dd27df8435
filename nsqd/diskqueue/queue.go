package diskqueue

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"sync"
)

// Defaults of Config.
const (
	DefaultSegmentBytes = 100 << 20
	DefaultMaxRecord    = 64 << 20
)

// ErrClosed says that the queue or folder is closed.
var ErrClosed = errors.New("closed")

// Keys of log attributes, besides those of obs.
const (
	keyQueue   = "queue"
	keyFile    = "file"
	keyBytes   = "bytes"
	keyRecords = "records"
	keyOffset  = "offset"
)

// Config is what a queue is opened with.
type Config struct {
	// Dir is the folder it is in, Name its name there: see ErrName.
	Dir  *Dir
	Name string
	// SegmentBytes is the size at which a segment file is full. A file is larger
	// only when the records of one Append are. At least 1 KiB; 0 means
	// DefaultSegmentBytes.
	SegmentBytes int64
	// MaxRecord is the greatest length of a record in bytes, at most 1 GiB; 0
	// means DefaultMaxRecord. It may change from one opening to the next: longer
	// records that are there already can still be read.
	MaxRecord int
	// Log gets a line for each thing that is wrong with a file; nil means none.
	Log *slog.Logger
}

func (c *Config) check() error {
	var faults []error
	if c.Dir == nil {
		faults = append(faults, errors.New("no Dir"))
	}
	if !validName(c.Name) {
		faults = append(faults, fmt.Errorf("%w %q", ErrName, c.Name))
	}
	if c.SegmentBytes == 0 {
		c.SegmentBytes = DefaultSegmentBytes
	} else if c.SegmentBytes < 1<<10 {
		faults = append(faults, fmt.Errorf("SegmentBytes is %d, at least %d is needed", c.SegmentBytes, 1<<10))
	}
	if c.MaxRecord == 0 {
		c.MaxRecord = DefaultMaxRecord
	} else if c.MaxRecord < 0 || c.MaxRecord > maxRecordLimit {
		faults = append(faults, fmt.Errorf("MaxRecord is %d, allowed are 1 to %d", c.MaxRecord, maxRecordLimit))
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return errors.Join(faults...)
}

// Queue is a queue of records on disk. All methods may be called at the same
// time. It has no goroutine and, while nothing is appended or read, next to no
// memory and after a Checkpoint no open file; its files are created by the
// first Append.
//
// Appending, reading and keeping the cursor file are three turns, each a lock
// that is held while files are read or written, because that is what it puts
// in order. What they share is guarded by mu, which is never held during I/O,
// so that Release, Rewind, Unread, Held and Stats never wait for a disk, and a
// slow fsync, which needs no turn, does not hold up Append or Read.
//
// Lock order: appending, reading, keeping, mu.
type Queue struct {
	// Set once.
	dir    *Dir
	disk   Disk
	name   string
	folder string
	limit  int64 // bytes of a segment
	max    int   // bytes of a record
	log    *slog.Logger

	appending sync.Mutex // one Append at a time; also held to shut the active segment
	reading   sync.Mutex // one Read at a time
	keeping   sync.Mutex // one change of the cursor file at a time

	mu sync.Mutex

	// Guarded by mu.

	// Invariant: numbers ascend; all but active are shut; released <= cursor;
	// first is the sum of what is in the segments before.
	segments []*segment
	active   *segment // the last of segments, if it may be appended to
	next     uint64   // number of the next segment
	released Position // before it: done with
	cursor   Position // before it: read, since the last Rewind
	kept     Position // in the cursor file
	atRest   uint64   // stats.Appended at the last checkpoint
	resting  bool     // nothing was appended or read since
	placed   bool     // the folder and the files in it that hold records would be found after a loss of power
	closed   bool
	keepLast bool // see KeepLast

	syncing  bool      // an fsync is under way, by one of the callers of SyncTo
	syncDone sync.Cond // it ended
	unsynced uint64    // no segment with a lower number is dirty

	// Of segments with damage, the position up to which they were durable when
	// it was found, if not to the end: one for each, for as long as q is open.
	lost []Position

	stats Stats
}

// Stats are a queue's figures. Counters start at 0 when it is opened.
type Stats struct {
	// Now.
	Segments int   // files that hold records
	Bytes    int64 // of records in them, with what frames them

	// Counters of records and their bytes.
	Appended, AppendedBytes uint64
	Read, ReadBytes         uint64 // a record that is read again counts again

	// Counters of operations.
	Syncs       uint64 // calls of Sync and SyncTo that had to wait
	Fsyncs      uint64 // of segments, for them
	Checkpoints uint64 // that wrote the cursor file
	Emptied     uint64

	// Counters of faults. All but NoSpace and the errors that callers get are
	// logged.
	NoSpace      uint64 // appends refused since the disk was full
	AppendErrors uint64 // and those that failed for another reason
	ReadErrors   uint64
	SyncErrors   uint64 // fsyncs that failed
	KeepErrors   uint64 // checkpoints that failed, and files that could not be deleted or finished
	Torn         uint64 // ends of segments that were cut, without a record in them
	TornBytes    uint64
	Quarantined  uint64 // segments with damage, now named .bad
	LostBytes    uint64 // of those, that were skipped
	Missing      uint64 // segments that should be there and are not
}

// Open opens a queue, after what a loss of power left of it if need be. It
// creates no file. The error is ErrInUse when the queue is open already, and
// ErrClosed when cfg.Dir is closed; an error about reading a file means that
// nothing was changed for it, and opening again may help.
func Open(cfg Config) (*Queue, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("open queue: %w", err)
	}
	if err := cfg.Dir.claim(cfg.Name); err != nil {
		return nil, fmt.Errorf("open queue %s: %w", cfg.Name, err)
	}
	q := &Queue{
		dir:    cfg.Dir,
		disk:   cfg.Dir.disk,
		name:   cfg.Name,
		folder: cfg.Dir.folder(cfg.Name),
		limit:  cfg.SegmentBytes,
		max:    cfg.MaxRecord,
		log:    cfg.Log,
		next:   1,
	}
	q.syncDone.L = &q.mu
	if err := q.recover(); err != nil {
		cfg.Dir.unclaim(cfg.Name)
		return nil, fmt.Errorf("open queue %s: %w", cfg.Name, err)
	}
	return q, nil
}

// Name returns the queue's name.
func (q *Queue) Name() string { return q.name }

// Unread returns how many records are yet to be read, and their size in the
// files. Records that turn out to be damaged count until they are skipped.
func (q *Queue) Unread() (records, bytes int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.total().minus(q.upTo(q.cursor))
	return t.records, t.bytes
}

// Held is to what is not released what Unread is to what is not read.
func (q *Queue) Held() (records, bytes int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.total().minus(q.upTo(q.released))
	return t.records, t.bytes
}

// Stats returns the queue's figures.
func (q *Queue) Stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := q.stats
	s.Segments = len(q.segments)
	for _, seg := range q.segments {
		s.Bytes += seg.end - headerSize
	}
	return s
}

// total is all that is in the queue.
// Requires: mu held.
func (q *Queue) total() total {
	if len(q.segments) == 0 {
		return total{}
	}
	return q.segments[len(q.segments)-1].total()
}

// upTo is what is before p.
// Requires: mu held.
func (q *Queue) upTo(p Position) total {
	i := q.find(p.segment)
	switch {
	case i == len(q.segments):
		return q.total()
	case q.segments[i].number > p.segment:
		return q.segments[i].first
	}
	return q.segments[i].upTo(p.offset, p.index)
}

// find returns the index of the first segment with that number or a higher
// one.
// Requires: mu held.
func (q *Queue) find(number uint64) int {
	if len(q.segments) > 0 && q.segments[0].number >= number {
		return 0
	}
	i, _ := slices.BinarySearchFunc(q.segments, number, func(s *segment, n uint64) int {
		switch {
		case s.number < n:
			return -1
		case s.number > n:
			return 1
		}
		return 0
	})
	return i
}

// segment returns the segment with that number, or nil.
// Requires: mu held.
func (q *Queue) segment(number uint64) *segment {
	if i := q.find(number); i < len(q.segments) && q.segments[i].number == number {
		return q.segments[i]
	}
	return nil
}

// last is the position after the last record.
// Requires: mu held.
func (q *Queue) last() Position {
	if len(q.segments) == 0 {
		return q.released
	}
	return maxPosition(q.released, q.segments[len(q.segments)-1].last())
}

func maxPosition(a, b Position) Position {
	if a.Before(b) {
		return b
	}
	return a
}

// drop takes the first n segments out of the queue, and returns their files to
// be closed.
// Requires: mu held.
func (q *Queue) drop(n int) []File {
	var files []File
	for _, s := range q.segments[:n] {
		s.dropped = true
		if s == q.active {
			q.active = nil
		}
		if file := q.surplus(s); file != nil {
			files = append(files, file)
		}
	}
	q.segments = slices.Delete(q.segments, 0, n)
	return files
}

// Empty drops all records, read or not. What is appended after it is kept.
func (q *Queue) Empty() error {
	q.appending.Lock()
	defer q.appending.Unlock()
	q.keeping.Lock()
	defer q.keeping.Unlock()

	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return ErrClosed
	}
	to := start(q.next)
	if len(q.segments) == 0 && (q.kept == to || q.next == 1) {
		q.mu.Unlock()
		return nil
	}
	// Whatever becomes of the cursor file, nothing that is appended later is
	// before it.
	q.shut()
	q.mu.Unlock()

	// The cursor goes first: with the files deleted first, a loss of power could
	// leave the later ones alone, and half of what was dropped would come back.
	// On a full disk there is no choice.
	err := q.keep(to)
	if err != nil && !errors.Is(err, ErrNoSpace) {
		return fmt.Errorf("empty queue %s: %w", q.name, err)
	}
	q.mu.Lock()
	q.released, q.cursor = to, to
	q.stats.Emptied++
	q.mu.Unlock()
	if deleted := q.deleteBefore(to.segment); deleted != nil {
		return fmt.Errorf("empty queue %s: %w", q.name, deleted)
	}
	if err != nil {
		if err := q.keep(to); err != nil {
			return fmt.Errorf("queue %s is empty, but that is not on disk: %w", q.name, err)
		}
	}
	return nil
}

// Close checkpoints the queue and makes it durable, and closes it even if
// there is an error.
func (q *Queue) Close() error {
	q.appending.Lock()
	defer q.appending.Unlock()
	q.reading.Lock()
	defer q.reading.Unlock()
	q.keeping.Lock()
	defer q.keeping.Unlock()

	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return ErrClosed
	}
	active := q.shut()
	q.mu.Unlock()

	// With a footer there is nothing to recover when the queue is opened again.
	q.seal(active)
	kept := q.checkpoint()
	synced := q.Sync()
	q.end()
	q.dir.unclaim(q.name)
	if err := errors.Join(kept, synced); err != nil {
		return fmt.Errorf("close queue %s: %w", q.name, err)
	}
	return nil
}

// Remove closes the queue and deletes it, with its quarantined files. If the
// process ends before it is done, the next OpenDir completes it or the queue
// is there as it was.
func (q *Queue) Remove() error {
	q.appending.Lock()
	defer q.appending.Unlock()
	q.reading.Lock()
	defer q.reading.Unlock()
	q.keeping.Lock()
	defer q.keeping.Unlock()

	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return ErrClosed
	}
	q.shut()
	q.mu.Unlock()
	q.end()
	err := q.dir.remove(q.name)
	q.dir.unclaim(q.name)
	if err != nil {
		return fmt.Errorf("remove queue %s: %w", q.name, err)
	}
	return nil
}

// Retire is Remove of a queue in which everything is done with, but leaves it, empty,
// if there are files with damage: they are kept.
func (q *Queue) Retire() error {
	q.mu.Lock()
	end := q.last()
	q.mu.Unlock()
	q.Release(end)
	names, err := q.disk.List(q.folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(fmt.Errorf("remove queue %s: %w", q.name, err), q.Close())
	}
	for _, name := range names {
		if _, bad, ok := parseSegmentName(name); ok && bad {
			return q.Close()
		}
	}
	return q.Remove()
}

// shut ends appending to the active segment, which it returns, or nil.
// Requires: appending and mu held.
func (q *Queue) shut() *segment {
	s := q.active
	if s != nil {
		s.shut = true
		q.active = nil
	}
	return s
}

// end marks the queue as closed and closes its files.
// Requires: all turns held.
func (q *Queue) end() {
	q.mu.Lock()
	q.closed = true
	for q.syncing {
		q.syncDone.Wait()
	}
	files := q.drop(len(q.segments))
	q.mu.Unlock()
	q.syncDone.Broadcast() // others who wait for a sync
	q.close(files...)
}
