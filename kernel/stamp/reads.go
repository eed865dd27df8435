package stamp

// readsKept is how many reads a Reads remembers. A driver asks for a message
// right after the read that completed it, so one would nearly do; the others
// serve a driver that parses late, after it was held back by a full queue.
const readsKept = 4

// Reads remembers when the last few reads of one stream ended, and where.
// The zero value has seen no read. Not safe for concurrent use.
//
// Invariant: ends never decrease from an older to a newer entry.
type Reads struct {
	// owned by the stream's reader
	count uint64
	last  [readsKept]struct {
		end int64
		at  Mono
	}
}

// Note records a read that ended at stream offset end (one past its last
// byte) and returned at the given time.
//
// Requires: end not below the end of the read before.
func (r *Reads) Note(end int64, at Mono) {
	e := &r.last[r.count%readsKept]
	e.end, e.at = end, at
	r.count++
}

// At returns when the read that brought the byte at offset off returned. A
// read that is forgotten is answered with the oldest one still known, which
// is later; ok is false when no read has brought that byte yet.
func (r *Reads) At(off int64) (at Mono, ok bool) {
	for i := r.count; i > 0 && r.count-i < readsKept; i-- {
		e := &r.last[(i-1)%readsKept]
		if e.end <= off {
			break
		}
		at, ok = e.at, true
	}
	return at, ok
}

// End returns the offset one past the last byte read.
func (r *Reads) End() int64 {
	if r.count == 0 {
		return 0
	}
	return r.last[(r.count-1)%readsKept].end
}
