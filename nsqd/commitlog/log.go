// Package commitlog keeps the messages of each topic in one log, in the order of acceptance. Each
// channel has a cursor in its topic's log. The package knows records and offsets, and must not
// know cursors or topics: a snapshot of cursors is an opaque string of bytes.
//
// nsqd/broker relies on the interface Log; logtest has the tests for every implementation. Read
// log.go next.
package commitlog

import (
	"errors"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Offset is the place of a record in its topic's log. Offsets grow by one from record to record,
// except where records were never written or are lost. An offset is never reused, not even after
// a Trim of the whole log or a restart. The only exception: after a crash that lost the record,
// if no snapshot of cursors was saved after the record's Append.
type Offset uint64

// Log is the log of one topic. Safe for concurrent use.
//
// Invariants, of each implementation:
//
//   - Append is all or nothing. Read returns records in the order of their Append calls.
//   - A failed Append changes nothing except, perhaps, the next offset.
//   - A record never changes: until Trim, Read returns its exact bytes. An unreadable record is
//     skipped, counted and logged.
//   - The next offset is greater than the offset of every readable or trimmed record. It is also
//     not less than at the last loadable SaveCursors. So no offset in a snapshot is ever reused
//     for another record.
type Log interface {
	// Append adds the records at the end, in the order of the batch, and sets their Offset. A
	// record keeps its own Offset if that is greater than the next offset; the offsets in between
	// are then never used. Any other record gets the next offset. Append returns the first
	// record's offset, or the next offset for an empty batch.
	//
	// After Append the records survive the end of the process; after Sync, a loss of power. The
	// records belong to the caller again.
	//
	// Errors: ErrNoSpace, after which a later call may succeed; ErrRecord; ErrClosed; an error of
	// the disk. After an error nothing was appended.
	Append(batch []Record) (first Offset, err error)

	// Sync returns nil once the record before upTo, with the other records of its Append, is on
	// stable storage. The same holds for all earlier records except records whose sync failed;
	// Sync reports such a failure only to callers that wait for these records. Sync returns at
	// once if the records are already durable or trimmed. Concurrent callers share one fsync.
	//
	// Errors: a *SyncError means that it is unknown, permanently, whether the record before upTo
	// is durable. The record stays in the log, and records appended later are not affected. After
	// any other error the caller may retry.
	Sync(upTo Offset) error

	// Read fills the batch with records from an offset on: at most max.Records records, and at
	// most max.Bytes of bodies and attributes unless the first record alone has more. Read may return fewer
	// records than there are. The next Read continues at into.Next.
	//
	// Invariant: a record in [from, into.Next) that is not in the batch can never be read: it was
	// trimmed, was lost, or never existed. Next > from unless there is nothing to read. Then Next
	// == from, which is no error.
	//
	// Read overwrites the batch. After an error the batch is empty, with Next == from.
	Read(from Offset, max Limit, into *Batch) error

	// Trim declares that no cursor needs the records before an offset. Trim frees whole segments,
	// and retention may delay it; until then the records stay readable. After an error the caller
	// may retry.
	Trim(before Offset) error

	// SaveCursors atomically replaces the snapshot of the cursors. LoadCursors returns the new
	// snapshot or, after a crash or an error, the previous snapshot. The snapshot survives what
	// appended records survive; in a durable log also a loss of power. The snapshot's content is
	// opaque to the log. The bytes belong to the caller again.
	SaveCursors(snapshot []byte) error

	// LoadCursors returns the snapshot, or nil without an intact snapshot. A damaged snapshot is
	// counted and logged.
	LoadCursors() ([]byte, error)
}

// Record is one message of the log.
type Record struct {
	Offset    Offset // see Append
	ID        wire.MessageID
	Timestamp mono.Wall // of the message
	Arrival   mono.Wall
	Source    stamp.Source // of the arrival
	Attempts  uint16       // deliveries so far, if Channel is set
	// Due is the earliest time of delivery; 0: at once.
	Due mono.Wall
	// Access is the access delay plus 1, if the message has had its token; 0: unknown.
	Access time.Duration
	// Channel names the single channel of a record that was carried forward or imported. Empty:
	// every channel that exists when the message is released.
	Channel   []byte
	Attribute []byte // of the message; may be empty
	Body      []byte
}

// Check returns an ErrRecord unless the record is valid, for an implementation of Log.
func (r *Record) Check(maxBody int) error {
	if len(r.Body) > maxBody || len(r.Channel) > MaxChannel || len(r.Attribute) > wire.MaxAttribute || int(r.Source) >= stamp.Sources {
		return fmt.Errorf("%w: a body of %d bytes, allowed are %d; a channel's name of %d, allowed are %d; an attribute of %d, allowed are %d; source %d",
			ErrRecord, len(r.Body), maxBody, len(r.Channel), MaxChannel, len(r.Attribute), wire.MaxAttribute, r.Source)
	}
	return nil
}

// MaxChannel is the maximum length of Record.Channel, in bytes.
const MaxChannel = 255

// Limit bounds the result of one Read. Values below 1 mean 1.
type Limit struct {
	Records int
	Bytes   int // of bodies and attributes
}

// Batch is the result of a Read. The zero value is ready for use; reusing a batch avoids
// allocation.
type Batch struct {
	// Records are in the order of their offsets. Their slices refer to the batch's memory,
	// which the next Read overwrites.
	Records []Record
	// Next is the offset of the next Read.
	Next Offset

	buf []byte
}

// Buffer returns the batch's memory, resized to n bytes, for an implementation of Log. The
// previous content is lost.
func (b *Batch) Buffer(n int) []byte {
	if cap(b.buf) < n || cap(b.buf) > keepBuffer && n <= keepBuffer {
		b.buf = make([]byte, n)
	}
	return b.buf[:n]
}

// keepBuffer is the largest buffer, in bytes, that a batch keeps for a smaller Read.
const keepBuffer = 2 << 20

// Errors that callers distinguish; returned wrapped.
var (
	// ErrClosed means that the log or folder is closed or was deleted.
	ErrClosed = errors.New("closed")
	// ErrNoSpace means that the disk, or the quota on it, is full.
	ErrNoSpace = errors.New("no space on disk")
	// ErrRecord means that a record is invalid: its body, attribute or channel is too long, or a
	// number is out of range.
	ErrRecord = errors.New("invalid record")
)

// SyncError means that an fsync failed. It is then unknown, permanently, whether the records of
// the file are on stable storage: the system may count failed writes as done, so that the next
// fsync succeeds. The log therefore appends to a new file and never fsyncs the old file again.
// The old file's records stay in the log as long as they are readable.
type SyncError struct {
	Log   string
	First Offset // of the file
	Err   error
}

func (e *SyncError) Error() string {
	return fmt.Sprintf("records of log %s may not be durable: sync the file from offset %d: %v", e.Log, e.First, e.Err)
}

func (e *SyncError) Unwrap() error { return e.Err }
