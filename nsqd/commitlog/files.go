package commitlog

import (
	"cmp"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/mono"
)

// Defaults of Config.
const (
	DefaultSegmentBytes = 100 << 20
	DefaultMaxBody      = 64 << 20
	DefaultOpenFiles    = 4
)

// Keys of log attributes, besides those of obs.
const (
	keyLog     = "log"
	keyFile    = "file"
	keyBytes   = "bytes"
	keyRecords = "records"
	keyOffset  = "offset"
)

// Config is what a log is opened with.
type Config struct {
	// Dir is the folder it is in, Name its name there: see ErrName.
	Dir  *Dir
	Name string
	// SegmentBytes is the size at which a segment file is full. A file is larger
	// only when the records of one Append are. At least 1 KiB; 0 means
	// DefaultSegmentBytes.
	SegmentBytes int64
	// MaxBody is the maximum length of a record's body in bytes, at most LargestBody; 0
	// means DefaultMaxBody. It may change from one opening to the next: longer
	// records that are there already can still be read.
	MaxBody int
	// Durable has snapshots of cursors survive the loss of power, too.
	Durable bool
	// OpenFiles is how many files stay open since they were read last: one more closes the
	// one that was read least recently. Beside them the one that is appended to is open, and
	// those that are full and not fsynced yet. 0 means DefaultOpenFiles.
	OpenFiles int
	// Retain is which records stay after Trim.
	Retain Retain
	// Now reads the clock, for Retain; nil means that of the system.
	Now func() mono.Wall
	// Log gets a line for each thing that is wrong with a file; nil means none.
	Log *slog.Logger
}

// Retain keeps records that no cursor needs any more, by whole segments: those with a
// record that is not older than Age, and, of them all, the newest of so many Bytes on
// disk, at least, and at most a segment more. If both are set, a segment has to meet
// both; if neither is, none is kept.
type Retain struct {
	Age   time.Duration
	Bytes int64
}

func (c *Config) check() error {
	c.SegmentBytes, c.MaxBody = cmp.Or(c.SegmentBytes, DefaultSegmentBytes), cmp.Or(c.MaxBody, DefaultMaxBody)
	c.OpenFiles = cmp.Or(c.OpenFiles, DefaultOpenFiles)
	if c.Now == nil {
		c.Now = func() mono.Wall { return mono.Wall(time.Now().UnixNano()) }
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	var errs faults.List
	errs.If(c.Dir == nil, "no Dir")
	errs.If(!validName(c.Name), "%w %q", ErrName, c.Name)
	errs.If(c.SegmentBytes < 1<<10, "SegmentBytes is %d, at least %d is needed", c.SegmentBytes, 1<<10)
	errs.If(c.MaxBody < 0 || c.MaxBody > LargestBody, "MaxBody is %d, allowed are 1 to %d", c.MaxBody, LargestBody)
	errs.If(c.OpenFiles < 0, "OpenFiles is %d", c.OpenFiles)
	errs.If(c.Retain.Age < 0 || c.Retain.Bytes < 0, "Retain is %v and %d B: less than nothing", c.Retain.Age, c.Retain.Bytes)
	return errs.Err()
}

// Files is a Log in segment files. It has no goroutine and, while nothing is
// appended or read, next to no memory and after Rest no open file; its files are
// created by the first Append or SaveCursors.
//
// Beside what Log guarantees: a record that is returned is one that was appended,
// byte for byte. What cannot be read is skipped, counted and logged, its file is
// kept under another name, and everything else in the log is still read. Nothing
// intact is destroyed by recovery: a file is cut only after its last intact record.
//
// Appending, reading and keeping (what is trimmed and saved) are three turns, each
// a lock that is held while files are read or written, because that is what it puts
// in order. What they share is guarded by mu, which is never held during I/O, so
// that Stats never waits for a disk, and a slow fsync, which needs no turn, does not
// hold up Append or Read.
//
// Lock order: appending, reading, keeping, mu.
type Files struct {
	// Set once.
	folder folder
	cfg    Config

	appending sync.Mutex // one Append at a time; also held to shut the active segment
	reading   sync.Mutex // one Read at a time
	keeping   sync.Mutex // one Trim or SaveCursors at a time

	scratch []mark // guarded by appending
	listed  bool   // in Dir.mu.opened; guarded by Dir.mu

	ends      ends      // guarded by reading
	snapshots snapshots // guarded by keeping

	mu sync.Mutex

	// Guarded by mu.
	segments  segments
	next      Offset
	savedNext Offset // next, when cursors were saved
	trimmed   Offset // what is before it is not needed
	retain    Retain
	found     bool // the folder and the files in it that hold records would be found after a loss of power
	closed    bool

	syncing  bool      // an fsync is under way, by one of the callers of Sync
	syncDone sync.Cond // it ended
	unsynced Offset    // no segment with a lower base is dirty

	kept  int // files with damage of which nothing is needed any more
	stats Stats
}

var _ Log = (*Files)(nil)

// Stats are a log's counters and sizes. Counters start at 0 when it is opened.
type Stats struct {
	// Now.
	First, Next Offset // of the oldest record that there may be, and the next
	Segments    int    // files that hold records
	Damaged     int    // files with damage, which are kept
	Bytes       int64  // of those files
	Records     int64  // in them that can be read, as far as is known; trimmed ones are still in it
	OpenFiles   int
	Pending     int64 // bytes on their way to replicas

	// Counters of records, and of what they took on disk.
	Appended, AppendedBytes uint64
	Read, ReadBytes         uint64 // a record that is read again counts again

	// Counters of operations.
	Syncs  uint64 // calls of Sync that had to wait
	Fsyncs uint64 // of segments, for them
	// StoredSeconds is how long the blocks counted by Fsyncs took until most replicas had
	// them, in sum.
	StoredSeconds float64
	Saves         uint64 // of cursors
	SavedBytes    uint64
	Trimmed       uint64 // segments that were deleted

	// Counters of faults. All but NoSpace and the errors that callers get are
	// logged.
	NoSpace      uint64 // appends refused since the disk was full
	AppendErrors uint64 // and those that failed for another reason
	ReadErrors   uint64
	SyncErrors   uint64 // fsyncs that failed
	KeepErrors   uint64 // of SaveCursors, and files that could not be deleted or finished
	Torn         uint64 // ends of segments that were cut, without a record in them
	TornBytes    uint64
	Quarantined  uint64 // segments with damage, now named .bad
	LostBytes    uint64 // of those, that were skipped
	// Unreadable counts records on disk that cannot be read, also in files that an earlier process
	// has set aside. It is exact where a footer, this process or the lengths of the records tell how
	// many there were; elsewhere each place with damage counts as one record.
	Unreadable uint64
	Missing    uint64 // places where records should be and are not
}

// Open opens a log, after what a loss of power left of it if need be. It creates
// no file. The error is ErrInUse when the log is open already, and ErrClosed when
// cfg.Dir is closed; an error about reading a file means that nothing was changed
// for it, and opening again may help.
func Open(cfg Config) (*Files, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	if err := cfg.Dir.claim(cfg.Name); err != nil {
		return nil, fmt.Errorf("open log %s: %w", cfg.Name, err)
	}
	l := &Files{
		folder:   folder{cfg.Dir.disk, cfg.Dir.path, cfg.Dir.folder(cfg.Name)},
		cfg:      cfg,
		retain:   cfg.Retain,
		segments: segments{read: make([]*segment, cfg.OpenFiles), files: &cfg.Dir.files},
	}
	l.syncDone.L = &l.mu
	l.snapshots = snapshots{folder: l.folder, durable: cfg.Durable}
	if err := l.recover(); err != nil {
		cfg.Dir.unclaim(l)
		return nil, fmt.Errorf("open log %s: %w", cfg.Name, err)
	}
	return l, nil
}

// Stats returns the log's counters and sizes.
func (l *Files) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Next, s.First, s.Bytes = l.next, l.next, l.segments.bytes
	s.Segments, s.Damaged = len(l.segments.all), l.kept
	for i, seg := range l.segments.all {
		if i == 0 {
			s.First = seg.base
		}
		s.Records += seg.records
		if seg.damaged {
			s.Damaged++
		}
		if seg.file != nil {
			s.OpenFiles++
		}
	}
	return s
}

// Size is what the log takes on disk, in bytes, but for the cursors.
func (l *Files) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.segments.bytes
}

// Needed is the part of Size that is not retained alone.
func (l *Files) Needed() (bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.segments.all[l.segments.at(l.trimmed):] {
		bytes += s.size()
	}
	return bytes
}

// SetRetain changes Config.Retain, from the next Trim on.
func (l *Files) SetRetain(r Retain) {
	l.mu.Lock()
	l.retain = r
	l.mu.Unlock()
}

// Need ends what Trim said of the records from an offset on: a cursor needs them again,
// as far as they are there. It returns the offset of the oldest that may be.
// Requires: no Trim at the same time.
func (l *Files) Need(from Offset) (first Offset) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trimmed = min(l.trimmed, from)
	if len(l.segments.all) == 0 {
		return l.next
	}
	return l.segments.all[0].base
}

// Records is how many there may be from an offset on: the part of a segment is estimated.
func (l *Files) Records(from Offset) (n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.segments.all[l.segments.at(from):] {
		if s.base < from { // it is all of one density
			n += int64(float64(s.records) * float64(s.next-from) / float64(s.next-s.base))
		} else {
			n += s.records
		}
	}
	return n
}

// Rest gives back what a log that is not in use need not hold: its files, after it
// has made durable what is in them. Any use ends it.
func (l *Files) Rest() error {
	l.appending.Lock()
	defer l.appending.Unlock()
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return ErrClosed
	}
	next := l.next
	l.mu.Unlock()
	_ = l.Sync(next) // a file is not closed before; an error concerns those who ask for it, and was logged
	l.rest()
	return nil
}

// tryRest is Rest, unless the log is being appended to, and does not sync what an earlier
// process has left. It reports whether there is nothing more to close.
func (l *Files) tryRest() bool {
	if !l.appending.TryLock() {
		return false
	}
	defer l.appending.Unlock()
	l.mu.Lock()
	next, dirty, closed := l.next, false, l.closed
	for _, s := range l.segments.all {
		dirty = dirty || s.file != nil && s.dirty() && !s.old
	}
	l.mu.Unlock()
	if closed {
		return true
	}
	if dirty {
		_ = l.Sync(next) // as in Rest
	}
	l.rest()
	return l.Stats().OpenFiles == 0
}

// rest closes the files that are not in use. Requires: appending held.
func (l *Files) rest() {
	l.mu.Lock()
	l.segments.resting = true
	clear(l.segments.read)
	var files []File
	for _, s := range l.segments.all {
		if file := l.segments.surplus(s); file != nil {
			files = append(files, file)
		}
	}
	l.mu.Unlock()
	closeAll(files...)
}

// Close makes the log durable, and closes it even if there is an error.
func (l *Files) Close() error {
	l.appending.Lock()
	defer l.appending.Unlock()
	l.reading.Lock()
	defer l.reading.Unlock()
	l.keeping.Lock()
	defer l.keeping.Unlock()

	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return ErrClosed
	}
	active, next := l.segments.shut(), l.next
	l.mu.Unlock()

	// With a footer there is nothing to recover when the log is opened again.
	l.seal(active)
	synced := l.syncTo(next, noSegment)
	l.mu.Lock()
	for _, s := range l.segments.all {
		if synced == nil && s.fault != nil && s.next > l.trimmed {
			synced = &SyncError{Log: l.cfg.Name, First: s.base, Err: s.fault}
		}
	}
	l.mu.Unlock()
	l.end()
	l.cfg.Dir.unclaim(l)
	if synced != nil {
		return fmt.Errorf("close log %s: %w", l.cfg.Name, synced)
	}
	return nil
}

// Remove closes the log and deletes it, with its quarantined files. If the
// process ends before it is done, the next OpenDir completes it or the log is there
// as it was.
func (l *Files) Remove() error {
	l.appending.Lock()
	defer l.appending.Unlock()
	l.reading.Lock()
	defer l.reading.Unlock()
	l.keeping.Lock()
	defer l.keeping.Unlock()

	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return ErrClosed
	}
	l.segments.shut()
	l.mu.Unlock()
	l.end()
	err := l.cfg.Dir.remove(l.cfg.Name)
	l.cfg.Dir.unclaim(l)
	if err != nil {
		return fmt.Errorf("remove log %s: %w", l.cfg.Name, err)
	}
	return nil
}

// end marks the log as closed and closes its files.
// Requires: all turns held.
func (l *Files) end() {
	l.mu.Lock()
	l.closed = true
	for l.syncing {
		l.syncDone.Wait()
	}
	files := l.segments.drop(len(l.segments.all))
	l.mu.Unlock()
	l.syncDone.Broadcast() // others who wait for a sync
	closeAll(files...)
}
