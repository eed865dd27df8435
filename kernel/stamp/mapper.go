package stamp

// Ring gives access to one connection's records, newest at Head()-1. The
// kernel side appends while we read, so what a method returns may be out of
// date at once, but never wrong: a Record it returns ok for was whole.
type Ring interface {
	// Head returns how many indices have been reserved.
	Head() uint64
	// Size returns how many records the ring holds; they are the last ones.
	Size() uint64
	// Record returns the record of that index; ok is false if it is not
	// published yet or was overwritten.
	Record(index uint64) (r Record, ok bool)
}

// earlyReach is after how many bytes early records are dropped, used or not:
// long before sequence numbers could come round to theirs.
const earlyReach = 1 << 30

// Mapper finds the segments that carried a range of one connection's stream.
// Not safe for concurrent use. Before Begin it finds nothing.
//
// It relies on this: when user space has read a byte, the record of the
// segment that delivered it is published. And on records with a lower index
// being older, but for segments that several CPUs handled at the same moment.
// So records that were overwritten are older than all that are left.
//
// The first copy of a byte counts, also if a later copy is the one the kernel
// kept; records are searched in their order of arrival, so it is found first,
// and a duplicate is never looked at. Reordered segments are found because a
// record is retired when the bytes it carried have been asked for, not when
// its turn in the ring has come.
type Mapper struct {
	// owned by the connection's reader
	begun bool
	// base is the sequence number of stream offset 0.
	base uint32
	// early are the records from before the ring that still matter, oldest
	// first, and earlyUntil the offset from which they no longer can.
	early      []Record
	earlyUntil int64
	// Invariant: the bytes of all records below next have been asked for, or
	// the records are lost.
	next uint64
	// gap says that records below index low are lost, so that a byte without a
	// record is not a mystery, and the first record found for it may be a
	// second copy unless it is marked First. The bytes from a First record on
	// have all their records left, so a gap ends when one is retired.
	gap bool
	low uint64
	// lost counts records overwritten before they were retired.
	lost uint64
	// lastAt is the arrival of the furthest range that had a record, which
	// ended at lastEnd.
	lastEnd int64
	lastAt  Mono
}

// Begin tells where the stream starts and what came before the ring, when the
// reader is at offset now: early, oldest first, which the Mapper keeps, is all
// of it unless missing is true. It may be called again when more has become
// known.
func (m *Mapper) Begin(base uint32, early []Record, missing bool, now int64) {
	m.begun, m.base, m.early = true, base, early
	m.earlyUntil = now + earlyReach
	if missing {
		m.gap = true
	}
}

// Lost returns how many records were overwritten before they were retired.
// Not every one of them is a loss to a message: of a message in many segments
// the last few suffice.
func (m *Mapper) Lost() uint64 { return m.lost }

// Arrival returns when the bytes [start, end) of the stream were complete.
// They must have been read, since records of bytes that are still under way
// may be missing.
//
//   - Exact: the first copy of each byte has its record, or is older than one
//     that has.
//   - UpperBound: a record was found, but an older copy may have been lost.
//   - Interpolated: the record was lost, the time lies between its neighbours.
//   - ok is false: nothing is known.
//
// Requires: start < end; start not below the start of the call before; end -
// start less than 1 GiB.
func (m *Mapper) Arrival(r Ring, start, end int64) (a Arrival, ok bool) {
	if !m.begun {
		return Arrival{}, false
	}
	head := r.Head()
	m.catchUp(r, head)
	s, e := m.base+uint32(start), m.base+uint32(end)
	m.retire(r, head, start, s)

	at, found, sure := m.cover(r, head, s, e)
	switch {
	case found && sure:
		if end > m.lastEnd {
			m.lastEnd, m.lastAt = end, at
		}
		return Arrival{At: at, Source: Exact}, true
	case found:
		return Arrival{At: at, Source: UpperBound}, true
	case m.gap:
		return m.interpolate(r, head, end, e)
	}
	return Arrival{}, false
}

// catchUp skips records that were overwritten.
func (m *Mapper) catchUp(r Ring, head uint64) {
	if size := r.Size(); head-m.next > size {
		m.lost += head - size - m.next
		m.next = head - size
		m.gap, m.low = true, m.next
	}
}

// retire lets go of records that only carried bytes before s. It stops at the
// first that is not published: passing it would lose it.
func (m *Mapper) retire(r Ring, head uint64, start int64, s uint32) {
	if start >= m.earlyUntil {
		m.early = nil
	}
	for len(m.early) > 0 && !before(s, m.early[0].end()) {
		if m.early[0].First && m.low == 0 {
			m.gap = false
		}
		m.early = m.early[1:]
	}
	for m.next < head {
		rec, ok := r.Record(m.next)
		if !ok || before(s, rec.end()) {
			break
		}
		if rec.First {
			m.gap = false
		}
		m.next++
	}
}

// at returns the i-th record that is left, early ones first.
func (m *Mapper) at(r Ring, i uint64) (Record, bool) {
	n := uint64(len(m.early))
	if i < n {
		return m.early[i], true
	}
	return r.Record(m.next + i - n)
}

// cover returns when the last byte of [s, e) came: the latest of the times of
// the first copies. Bytes whose records are lost are older than any found, so
// they do not count beside one that is found; without a gap they make the
// answer unknown.
func (m *Mapper) cover(r Ring, head uint64, s, e uint32) (at Mono, found, sure bool) {
	n := uint64(len(m.early)) + head - m.next
	sure = true
	for o := s; ; {
		// One pass in order of arrival, for o and what follows it. Once a
		// record beyond o was passed over, o may not move on within the pass:
		// that record may be the first copy of what comes next.
		moved, ahead := false, false
		var nearest uint32
		for i := range n {
			rec, ok := m.at(r, i)
			switch {
			case !ok:
			case rec.covers(o):
				if !found || at.Before(rec.At) {
					at = rec.At
				}
				found, moved = true, true
				sure = sure && (!m.gap || rec.First)
				if !before(rec.end(), e) {
					return at, true, sure
				}
				o = rec.end()
			case before(o, rec.Seq) && before(rec.Seq, e):
				if !ahead || before(rec.Seq, nearest) {
					nearest = rec.Seq
				}
				ahead = true
			}
			if moved && ahead {
				break
			}
		}
		switch {
		case moved && ahead:
			// Again from the front, for the new o.
		case !m.gap:
			return 0, false, false
		case moved || !ahead:
			return at, found, sure
		default:
			o = nearest
		}
	}
}

// interpolate places the byte before end between the last range that was
// found and the oldest record left, which is younger than the lost one.
func (m *Mapper) interpolate(r Ring, head uint64, end int64, e uint32) (Arrival, bool) {
	for i := m.next; i < head; i++ {
		rec, ok := r.Record(i)
		if !ok || before(rec.Seq, e) {
			continue
		}
		if m.lastEnd == 0 {
			return Arrival{At: rec.At, Source: UpperBound}, true
		}
		at := min(m.lastAt, rec.At)
		if into := end - m.lastEnd; into > 0 {
			span := int64(rec.end()-e) + into
			at += Mono(float64(rec.At-at) * float64(into) / float64(span))
		}
		return Arrival{At: at, Source: Interpolated}, true
	}
	return Arrival{}, false
}
