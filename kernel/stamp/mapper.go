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

// tries is how often Arrival looks again when records were overwritten while it
// looked. Who floods the ring so fast gets the time after the read.
const tries = 3

// maxAhead is how far beyond what was asked for a record may lie and still be
// in order. It is more than TCP's largest window.
const maxAhead = 1 << 30

// Mapper finds the segments that carried a range of one connection's stream.
// Not safe for concurrent use. Before Begin it finds nothing.
//
// It relies on this: when user space has read a byte, the record of the
// segment that delivered it is published. And on records with a lower index
// being older, but for segments that several CPUs handled at the same moment.
// So records that were overwritten are older than all that are left.
//
// A record says that a segment came, not that TCP took it: TCP drops what has
// an old timestamp, is out of its window or has a bad checksum, and the peer
// may send such segments on purpose, with bytes that it only sends later. But
// the segment that TCP took has its record too. So a byte with one record came
// with that; of several, any may be the one, and the latest counts, which is
// not earlier. Nothing that the peer sends makes a byte older than it is. (The
// first copy counted once: who owned his connection could forge it.)
//
// Reordered segments are found because a record is retired when the bytes it
// carried have been asked for, not when its turn in the ring has come.
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
	// Invariant: each record from next to below sorted begins where the one
	// before it ends, or further on, and the last of them ends at sortedTo.
	sorted   uint64
	sortedTo uint32
	// gap says that records below next are lost, so that a byte without a
	// record is not a mystery, and the one record found for it may be a second
	// copy unless it is marked First. The bytes from a First record on have all
	// their records left, so a gap ends when one is retired.
	gap bool
	// lost counts records overwritten before they were retired.
	lost uint64
}

// Begin tells where the stream starts and what came before the ring, when the
// reader is at offset now: early, oldest first, which the Mapper keeps, is all
// of it unless missing is true.
//
// Requires: it was not called before.
func (m *Mapper) Begin(base uint32, early []Record, missing bool, now int64) {
	m.begun, m.base, m.early, m.gap = true, base, early, missing
	m.earlyUntil = now + earlyReach
}

// Lost returns how many records were overwritten before they were retired.
// Not every one of them is a loss to a message: of a message in many segments
// the last few suffice.
func (m *Mapper) Lost() uint64 { return m.lost }

// Arrival returns when the bytes [start, end) of the stream were complete, or
// a later time. They must have been read, since records of bytes that are still
// under way may be missing.
//
//   - Exact: each byte has one record, or is older than one that has.
//   - UpperBound: of bytes that have several, the latest.
//   - Overwritten: there is none left. The time is that of the oldest that is.
//   - ok is false: nothing is known.
//
// Requires: start < end; start not below the start of the call before; end -
// start less than 1 GiB.
func (m *Mapper) Arrival(r Ring, start, end int64) (a Arrival, ok bool) {
	if !m.begun {
		return Arrival{}, false
	}
	s := m.base + uint32(start)
	for range tries {
		head := r.Head()
		m.catchUp(r, head)
		m.retire(r, head, start, s)
		a, ok = m.find(r, head, s, uint32(end-start))
		if r.Head()-m.next <= r.Size() {
			return a, ok
		}
		// A record may have been overwritten before it was looked at, when one
		// that is older had been already.
	}
	return Arrival{}, false
}

// catchUp skips records that were overwritten. They are newer than the early
// ones, which must not be taken for theirs.
func (m *Mapper) catchUp(r Ring, head uint64) {
	if size := r.Size(); head-m.next > size {
		m.lost += head - size - m.next
		m.next = head - size
		m.early, m.gap = nil, true
	}
}

// retire lets go of records that only carried bytes before s. It stops at the
// first that is not published: passing it would lose it.
func (m *Mapper) retire(r Ring, head uint64, start int64, s uint32) {
	if start >= m.earlyUntil {
		m.early = nil
	}
	for len(m.early) > 0 && !before(s, m.early[0].end()) {
		if m.early[0].First {
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

// find returns the time of the latest record that has any of the size bytes
// from s on. Bytes whose records are lost are older than all that are left, so
// they do not count beside one that is found; without a gap they make the answer
// unknown.
func (m *Mapper) find(r Ring, head uint64, s, size uint32) (a Arrival, ok bool) {
	n := uint64(len(m.early)) + head - m.next
	ordered := n > 1 && m.inOrder(r, head, s)
	covered, first := uint64(0), true
	for i := range n {
		rec, ok := m.at(r, i)
		if !ok {
			continue
		}
		if c := rec.common(s, size); c > 0 {
			if covered == 0 || a.At.Before(rec.At) {
				a.At = rec.At
			}
			covered += uint64(c)
			first = first && rec.First
		}
		if ordered && !before(rec.end(), s+size) {
			break // the others begin further on
		}
	}
	switch {
	case covered == uint64(size) && !m.gap:
	case m.gap && covered == 0:
		return m.oldest(r, head)
	case m.gap && first && covered <= uint64(size):
	case covered < uint64(size) && !m.gap:
		return Arrival{}, false
	default:
		a.Source = UpperBound
	}
	return a, true
}

// inOrder reports whether no two of the records left have a byte in common
// because each begins where the one before ends, or further on. It looks at
// each record once, but at the one that is out of order, if any, until that is
// retired. Early records are few and soon gone: with them it says no.
func (m *Mapper) inOrder(r Ring, head uint64, s uint32) bool {
	if len(m.early) > 0 {
		return false
	}
	if m.sorted <= m.next {
		// The first one may have begun before s.
		m.sorted, m.sortedTo = m.next, s-sizeMask
	}
	for ; m.sorted < head; m.sorted++ {
		rec, ok := r.Record(m.sorted)
		// Distances from s: numbers that the peer chooses could go round
		// otherwise, and come back to a byte with every step forward.
		if from := int32(rec.Seq - s); !ok || from < int32(m.sortedTo-s) || from > maxAhead {
			return false
		}
		m.sortedTo = rec.end()
	}
	return true
}

// oldest bounds the time of a lost record by that of the oldest that is left.
func (m *Mapper) oldest(r Ring, head uint64) (Arrival, bool) {
	for i := range uint64(len(m.early)) + head - m.next {
		if rec, ok := m.at(r, i); ok {
			return Arrival{At: rec.At, Source: Overwritten}, true
		}
	}
	return Arrival{}, false
}
