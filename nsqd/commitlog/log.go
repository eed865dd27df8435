package commitlog

import (
	"errors"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Offset is the place of a record in its topic's log. Offsets grow by one from
// record to record, except where records were never written or are lost. One that
// was given to a record is never given to another, not after a Trim of everything or
// a restart; only after a crash that lost the record, and only if no snapshot of
// cursors was saved since it was appended.
type Offset uint64

// Log is one topic's. All methods may be called at the same time.
//
// Invariants, of each implementation:
//
//   - Append is all or nothing, and what Append returned first is read first.
//   - An error of Append changes nothing but, perhaps, the offset that is next.
//   - Record n of a log never changes: Read gives it as it was appended, byte for
//     byte, until it is trimmed; what cannot be read is left out, counted and logged.
//   - The next offset is greater than that of each record that can be read or was
//     trimmed, and not less than it was when SaveCursors was called, if that snapshot
//     can be loaded: no offset in a snapshot is ever another record's.
type Log interface {
	// Append puts the records at the end, in the order of the batch, and sets their
	// Offset. A record gets the next offset, or the one that it names if that is
	// greater: then those between are never used. It returns the first; for an empty
	// batch the offset that is next.
	//
	// The records survive the end of the process when it returns, and the loss of
	// power after Sync. They are the caller's again.
	//
	// Errors: ErrNoSpace, after which a later call may succeed; ErrRecord;
	// ErrClosed; that of the disk. Nothing was appended.
	Append(batch []Record) (first Offset, err error)

	// Sync returns nil when the record before upTo, with the others of its Append, is
	// on stable storage, and all before it but for those of which a sync has failed: who
	// appended those is told when he asks for them. At once if that is so already, or
	// they are trimmed. Callers at the same time share one fsync.
	//
	// Errors: a *SyncError says that the record before upTo may be durable or not, and
	// that this cannot be found out. It stays in the log. It concerns no record that is
	// appended later. Any other error may be tried again.
	Sync(upTo Offset) error

	// Read puts into the batch the records from an offset on: at most max.Records,
	// and bodies of at most max.Bytes in sum unless the first alone is longer. There
	// may be fewer though there are more. into.Next is from where to go on.
	//
	// Invariant: a record at or after from, before into.Next, and not in the batch
	// can never be read: it was trimmed, lost, or there was none. Next > from unless
	// there is nothing to read, which is no error; then Next == from.
	//
	// What the batch held before is overwritten. An error leaves it empty, with
	// Next == from.
	Read(from Offset, max Limit, into *Batch) error

	// Trim says that no cursor needs the records before an offset. They may be read
	// until their segment goes, which retention may put off. It frees the space of
	// whole segments only. After an error it may be called again.
	Trim(before Offset) error

	// SaveCursors replaces the snapshot of the cursors, atomically: LoadCursors
	// returns this one or, after a crash or an error, the one before. It survives what
	// appended records do; in a durable log, the loss of power. The log does not know
	// what is in it. The bytes are the caller's again.
	SaveCursors(snapshot []byte) error

	// LoadCursors returns the snapshot; nil if there is none, or none that is intact,
	// which is counted and logged.
	LoadCursors() ([]byte, error)
}

// Record is one message of the log.
type Record struct {
	Offset    Offset // see Append
	ID        wire.MessageID
	Timestamp mono.Wall // of the message
	Arrival   mono.Wall
	Source    stamp.Source // of the arrival
	Attempts  uint16       // deliveries so far, where Channel is set
	// Due is when it may be delivered first; 0: at once.
	Due mono.Wall
	// Access is its access delay, if it has had its token, plus 1: 0 says that this is
	// not known.
	Access time.Duration
	// Channel names the one channel that the record is for, if it was carried
	// forward or imported; empty: for each that there is when it is released.
	Channel []byte
	Body    []byte
}

// MaxChannel is the maximum length of Record.Channel.
const MaxChannel = 255

// Limit bounds what one Read returns. Records < 1 or Bytes < 1 mean 1.
type Limit struct {
	Records int
	Bytes   int // of bodies
}

// Batch is what a Read returned. The zero value is ready to be read into; who
// reads on with the same batch needs no memory.
type Batch struct {
	// Records are in the order of their offsets. Bodies and Channels are in memory of
	// the batch: they are overwritten by the next Read into it.
	Records []Record
	// Next is from where to read on.
	Next Offset

	buf []byte
}

// Buffer is the batch's memory for an implementation of Log to use, with a length
// of n. What was in it is lost.
func (b *Batch) Buffer(n int) []byte {
	if cap(b.buf) < n || cap(b.buf) > keepBuffer && n <= keepBuffer {
		b.buf = make([]byte, n)
	}
	return b.buf[:n]
}

// keepBuffer is the largest buffer that a batch keeps for a Read that needs less.
const keepBuffer = 2 << 20

// Errors that a caller may want to tell from others, wrapped.
var (
	// ErrClosed says that the log or folder is closed, or was deleted.
	ErrClosed = errors.New("closed")
	// ErrNoSpace says that the disk, or the quota on it, is full.
	ErrNoSpace = errors.New("no space on disk")
	// ErrRecord says that a record is not one that the log takes: its body is too
	// long, or the channel's name is, or a number is out of range.
	ErrRecord = errors.New("invalid record")
)

// SyncError says that an fsync failed. The records that it was for may be on stable
// storage or not, and that cannot be found out: the system may count what it failed
// to write as written, so that the next fsync says nothing. So what is appended next
// is in another file, and this one is not fsynced again. Its records stay in the
// log, and are read as long as they can be.
type SyncError struct {
	Log   string
	First Offset // of the file
	Err   error
}

func (e *SyncError) Error() string {
	return fmt.Sprintf("records of log %s may not be durable: sync the file from offset %d: %v", e.Log, e.First, e.Err)
}

func (e *SyncError) Unwrap() error { return e.Err }
