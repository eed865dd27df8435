package stamp

// readsKept is the number of reads that a Reads remembers. A driver looks a message up right after
// the read that completed it, so one would nearly suffice. The others serve a driver that parses
// late because of a full queue.
const readsKept = 4

// Reads remembers where the last reads of a stream ended, with a value for each read, such as its
// time. The zero value has no reads. Not safe for concurrent use.
//
// Invariant: ends never decrease from an older to a newer entry.
type Reads[T any] struct {
	// owned by the stream's reader
	count uint64
	last  [readsKept]struct {
		end   int64
		value T
	}
}

// Note records a read that ended at stream offset end (one past its last byte).
//
// Requires: end not below the previous read's end.
func (r *Reads[T]) Note(end int64, value T) {
	e := &r.last[r.count%readsKept]
	e.end, e.value = end, value
	r.count++
}

// At returns the value of the read that returned the byte at offset off. If that read is forgotten,
// At returns the value of the oldest remembered read. ok is false if the byte has not been read.
func (r *Reads[T]) At(off int64) (value T, ok bool) {
	for i := r.count; i > 0 && r.count-i < readsKept; i-- {
		e := &r.last[(i-1)%readsKept]
		if e.end <= off {
			break
		}
		value, ok = e.value, true
	}
	return value, ok
}

// Before returns the value of the last read that ended before the byte at offset off. ok is false
// if there was no such read or it is forgotten.
func (r *Reads[T]) Before(off int64) (value T, ok bool) {
	for i := r.count; i > 0 && r.count-i < readsKept; i-- {
		if e := &r.last[(i-1)%readsKept]; e.end <= off {
			return e.value, true
		}
	}
	return value, false
}

// End returns the offset one past the last byte read.
func (r *Reads[T]) End() int64 {
	if r.count == 0 {
		return 0
	}
	return r.last[(r.count-1)%readsKept].end
}
