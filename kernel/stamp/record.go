package stamp

import "github.com/srtm-io/srtm/internal/mono"

// Memory layout that the kernel program and user space share. Numbers are in the machine's byte
// order. A slot belongs to one connection. It consists of a header of HeaderSize bytes and a ring
// of records of RecordSize bytes each:
//
//	offset  size
//	     0     8  head: record indices reserved so far
//	     8     8  cookie of the owner, 0 when free
//	    16     4  base: TCP sequence number of stream offset 0; in the plain
//	              program, which does not know base, TCP's count of segments
//	    20     4  base known: 0 or 1, set after base
//	    24     4  top: the furthest end of a segment so far
//	    28    36  unused
//	    64    16  record 0: time (8, CLOCK_MONOTONIC in ns), meta (8)
//	    80    16  record 1 ...
//
// meta is stored after the time. Its format is:
//
//	63            32  31   30          12 11       0
//	+---------------+-----+--------------+----------+
//	| sequence no.  |first| payload size | lap mark |
//	+---------------+-----+--------------+----------+
//
// First is set if the segment begins at or beyond the end of all earlier segments of the connection
// (as far as the slot knows), so that none of its bytes had come before.
//
// The lap mark is the low 12 bits of the record's index. It distinguishes a record from the record
// one lap earlier in the same place, and from a record that is reserved but not written yet.
//
// For a connection without a slot, the kernel keeps EarlySize bytes:
//
//	 0     4  base, as above
//	 4     4  base known
//	 8     4  head
//	12     4  unused
//	16   128  a ring of EarlyRecords records
const (
	HeaderSize   = 64
	RecordSize   = 16
	EarlyRecords = 8
	EarlySize    = 16 + EarlyRecords*RecordSize

	OffsetHead    = 0
	OffsetCookie  = 8
	OffsetBase    = 16
	OffsetBaseSet = 20

	markMask = 1<<12 - 1
	sizeMask = 1<<19 - 1
	firstBit = 1 << 31
)

// The number of records in a ring is a power of two from MinRing to MaxRing. With MaxRing the lap
// mark still spans four laps.
const (
	MinRing = 64
	MaxRing = 1024
)

// Meta is the packed half of a record, as in memory.
type Meta uint64

// BlankMeta returns the initial meta at an index. It marks no index that belongs there, and covers
// no byte.
func BlankMeta(index uint64) Meta { return Meta((index + 1) & markMask) }

// Of reports whether the record at the index is published, and belongs to the current lap of the ring.
func (m Meta) Of(index uint64) bool { return uint64(m)&markMask == index&markMask }

// Record is a TCP segment as the kernel saw it arrive. Its payload is the Size bytes from sequence
// number Seq on. First means that none of the bytes came before.
type Record struct {
	At    mono.Time
	Seq   uint32
	Size  uint32
	First bool
}

// MakeRecord unpacks a record.
func MakeRecord(at mono.Time, m Meta) Record {
	return Record{At: at, Seq: uint32(m >> 32), Size: uint32(m>>12) & sizeMask, First: m&firstBit != 0}
}

// end returns the sequence number after the record's last byte.
func (r Record) end() uint32 { return r.Seq + r.Size }

// common returns how many of the size bytes from seq on the record carries.
func (r Record) common(seq, size uint32) uint32 {
	if into := seq - r.Seq; into < r.Size {
		return min(r.Size-into, size)
	}
	if off := r.Seq - seq; off < size {
		return min(r.Size, size-off)
	}
	return 0
}

// seqBefore reports whether a precedes b in the ring of sequence numbers.
//
// Requires: a and b are less than 2 GiB apart.
func seqBefore(a, b uint32) bool { return int32(a-b) < 0 }
