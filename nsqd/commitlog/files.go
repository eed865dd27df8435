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

// Keys of log attributes, besides the keys of obs.
const (
	keyLog     = "log"
	keyFile    = "file"
	keyBytes   = "bytes"
	keyRecords = "records"
	keyOffset  = "offset"
)

// Config configures a log.
type Config struct {
	// Dir is the log's parent folder, Name its name there: see ErrName.
	Dir  *Dir
	Name string
	// SegmentBytes is the size at which a segment file is full. A file is larger only if the
	// records of one Append are. At least 1 KiB; 0 means DefaultSegmentBytes.
	SegmentBytes int64
	// MaxBody is the maximum length of a record's body in bytes, at most LargestBody; 0 means
	// DefaultMaxBody. It may change between openings: longer records in the log stay readable.
	MaxBody int
	// Durable makes snapshots of cursors survive a loss of power, too.
	Durable bool
	// OpenFiles is the number of recently read files that stay open. The log closes the least
	// recently read file first. The active file, and full files before their fsync, stay open
	// besides. 0 means DefaultOpenFiles.
	OpenFiles int
	// Retain selects the records that stay after Trim.
	Retain Retain
	// Now reads the clock, for Retain; nil means the system's clock.
	Now func() mono.Wall
	// Log gets a line for each damaged file; nil discards the lines.
	Log *slog.Logger
}

// Retain keeps whole segments that no cursor needs. A positive Age keeps segments with a record
// no older than Age. A positive Bytes keeps the newest segments: at least Bytes on disk, and at
// most one segment more. If both are set, a segment must meet both; if neither is set, no segment
// is kept.
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

// Files is a Log in segment files. It has no goroutine. While idle it uses almost no memory, and
// after Rest no open file. The first Append or SaveCursors creates its files.
//
// In addition to Log's guarantees, every record that Read returns was appended with exactly these
// bytes. Read skips unreadable records, which are counted and logged. A file with such records is
// kept under another name, and all other records stay readable. Recovery never destroys an intact
// record: it cuts a file only after its last intact record.
//
// Appending, reading and keeping (Trim and SaveCursors) each have a lock, which is held during
// I/O to order the operations. Their shared state is guarded by mu, which is never held during
// I/O. So Stats never waits for a disk, and a slow fsync, which needs no other lock, does not
// block Append or Read.
//
// Lock order: appending, reading, keeping, mu.
type Files struct {
	// Set once.
	folder folder
	cfg    Config

	appending sync.Mutex // one Append at a time; also held to shut the active segment
	reading   sync.Mutex // one Read at a time
	keeping   sync.Mutex // one Trim or SaveCursors at a time

	// Guarded by appending.
	scratch    []mark
	attributes bool // a record of this process had an attribute: new segments permit them

	listed bool // in Dir.mu.opened; guarded by Dir.mu

	ends      ends      // guarded by reading
	snapshots snapshots // guarded by keeping

	mu sync.Mutex

	// Guarded by mu.
	segments  segments
	next      Offset
	savedNext Offset // next, at the last save of the cursors
	trimmed   Offset // earlier records are not needed
	retain    Retain
	found     bool // the folder and its record files survive a loss of power
	closed    bool

	syncing  bool      // a caller of Sync is running an fsync
	syncDone sync.Cond // signals the end of that fsync
	unsynced Offset    // no segment with a lower base is dirty

	kept  int // files with damage whose records are no longer needed
	stats Stats
}

var _ Log = (*Files)(nil)

// Stats are a log's counters and sizes. Counters start at 0 when the log is opened.
type Stats struct {
	// Now.
	First, Next Offset // of the oldest possible record, and the next
	Segments    int    // files with records
	Damaged     int    // files with damage, which are kept
	Bytes       int64  // of the files with records
	Records     int64  // readable records in these files, estimated; includes trimmed records
	OpenFiles   int
	Pending     int64 // bytes on their way to replicas

	// Counters of records, and of their bytes on disk.
	Appended, AppendedBytes uint64
	Read, ReadBytes         uint64 // repeated reads count again

	// Counters of operations.
	Syncs  uint64 // calls of Sync that had to wait
	Fsyncs uint64 // of segments
	// StoredSeconds is the total time, in seconds, until most replicas had the blocks counted by
	// Fsyncs.
	StoredSeconds float64
	Saves         uint64 // of cursors
	SavedBytes    uint64
	Trimmed       uint64 // deleted segments

	// Counters of errors. All except NoSpace and the errors returned to callers are logged.
	NoSpace      uint64 // appends refused because the disk was full
	AppendErrors uint64 // appends failed for another reason
	ReadErrors   uint64
	SyncErrors   uint64 // failed fsyncs
	KeepErrors   uint64 // failed SaveCursors, and files that could not be deleted or finished
	Torn         uint64 // cut ends of segments, without a record
	TornBytes    uint64
	Quarantined  uint64 // segments with damage, now named .bad
	LostBytes    uint64 // skipped bytes in these segments
	// Unreadable counts unreadable records on disk, including records in files set aside by
	// earlier processes. The count is exact if a footer, this process or the lengths of the
	// records give the number. Otherwise each damaged place counts as one record.
	Unreadable uint64
	Missing    uint64 // places with missing records
}

// Open opens a log and repairs the effects of a power loss. It creates no file. Errors: ErrInUse
// if the log is already open, and ErrClosed if cfg.Dir is closed. After an error reading a file
// nothing was changed for that file, and the caller may retry.
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

// Size returns the log's size on disk in bytes, without the cursors.
func (l *Files) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.segments.bytes
}

// Needed returns the part of Size that is not merely retained.
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

// Need cancels Trim for the records from an offset on, because a cursor needs them again. It
// returns the offset of the oldest possible record. Requires: no concurrent Trim.
func (l *Files) Need(from Offset) (first Offset) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trimmed = min(l.trimmed, from)
	if len(l.segments.all) == 0 {
		return l.next
	}
	return l.segments.all[0].base
}

// Records estimates the number of records from an offset on.
func (l *Files) Records(from Offset) (n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.segments.all[l.segments.at(from):] {
		if s.base < from { // assume evenly spread offsets
			n += int64(float64(s.records) * float64(s.next-from) / float64(s.next-s.base))
		} else {
			n += s.records
		}
	}
	return n
}

// Rest makes the files of an unused log durable and closes them. The next use reopens them.
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
	_ = l.Sync(next) // surplus closes only fsynced files; an error is logged and concerns only the callers that wait for the records
	l.rest()
	return nil
}

// tryRest is Rest, except that it skips a log with an Append under way and does not sync files of
// an earlier process. It reports whether no file is open any more.
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

// Close makes the log durable and closes it. Close also closes the log after an error.
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

	// With a footer the next Open has nothing to recover.
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

// Remove closes and deletes the log, with its quarantined files. If the process ends during
// Remove, the next OpenDir completes the removal or finds the log unchanged.
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

// end marks the log as closed and closes its files. Requires: appending, reading and keeping
// held.
func (l *Files) end() {
	l.mu.Lock()
	l.closed = true
	for l.syncing {
		l.syncDone.Wait()
	}
	files := l.segments.drop(len(l.segments.all))
	l.mu.Unlock()
	l.syncDone.Broadcast() // wakes other callers of Sync
	closeAll(files...)
}
