package diskqueue

import (
	"cmp"
	"fmt"
)

// Position is a place in a queue, just after a record. Positions of one queue
// are ordered, in the order of its records, and may be compared with ==; they
// keep their meaning when the queue is reopened. The zero Position is before
// everything.
type Position struct {
	segment uint64
	offset  int64 // of the file
	index   int64 // records of the segment before the offset that could be read; follows from the others
}

// Compare returns -1 when p is before o, 0 when they are the same, else 1.
func (p Position) Compare(o Position) int {
	return cmp.Or(cmp.Compare(p.segment, o.segment), cmp.Compare(p.offset, o.offset))
}

// Before reports whether p is before o.
func (p Position) Before(o Position) bool { return p.Compare(o) < 0 }

// String shows p for logs, as segment:offset.
func (p Position) String() string { return fmt.Sprintf("%d:%d", p.segment, p.offset) }

// start is the place before the first record of a segment.
func start(segment uint64) Position { return Position{segment: segment, offset: headerSize} }
