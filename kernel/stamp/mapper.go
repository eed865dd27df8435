package stamp

// Ring gives access to one connection's records, the newest at Head()-1. The kernel appends while
// user space reads, so a result may be out of date at once. A Record returned with ok was complete.
type Ring interface {
	// Head returns the number of indices reserved so far.
	Head() uint64
	// Size returns the capacity of the ring, which holds the last Size records.
	Size() uint64
	// Record returns the record at index. ok is false if the record is not published yet or was
	// overwritten.
	Record(index uint64) (r Record, ok bool)
}

// earlyReach is the number of stream bytes after which all early records are dropped, long before
// sequence numbers could wrap around to them.
const earlyReach = 1 << 30

// maxTries is the number of attempts of Arrival when records are overwritten meanwhile. A peer that
// floods the ring so fast gets the time after the read.
const maxTries = 3

// maxAhead is the maximum distance in bytes of an in-order record from the requested bytes. It is
// larger than TCP's largest window.
const maxAhead = 1 << 30

// Mapper finds the segments that carried a range of one connection's stream. Not safe for
// concurrent use. Before Begin it finds nothing.
//
// Mapper relies on two facts. When user space has read a byte, the record of the segment that
// delivered the byte is published. A record with a lower index is older, except among segments that
// several CPUs handled at the same moment. So overwritten records are older than all remaining
// records.
//
// A record means that a segment came, not that TCP accepted it. TCP drops segments with an old
// timestamp, out of the window or with a bad checksum. A peer may send such segments on purpose,
// with bytes that it really sends later. But the accepted segment has a record, too. So a byte with
// a single record came with that segment. For a byte with several records, the latest record
// counts, which is not too early. So a peer cannot make a byte appear older than it is. (An earlier
// version used the first record, which the peer could forge.)
//
// Reordered segments are found because a record is retired when its bytes have been requested, not
// when its turn in the ring has come.
type Mapper struct {
	// owned by the connection's reader
	started bool
	// base is the sequence number of stream offset 0.
	base uint32
	// early holds the records from before the ring that still matter, oldest first. From stream
	// offset earlyUntil on they are dropped.
	early      []Record
	earlyUntil int64
	// Invariant: below next, the bytes of each record have been requested, or the record is lost.
	next uint64
	// Invariant: from next to below sorted, each record begins at or after the end of the previous
	// record. The last of these records ends at sortedTo.
	sorted   uint64
	sortedTo uint32
	// gap means that records below next are lost. Then a byte may be without a record. The only
	// record of a byte may stem from a second copy, unless the record is marked First. All records of
	// the bytes from a First record on are still there, so the gap ends when a First record is
	// retired.
	gap bool
	// lost counts the records that were overwritten before they were retired.
	lost uint64
	sole sole
}

// sole is a record whose bytes no other record has, as long as the ring's head stays at head. Messages
// that came together are all in one record, so it saves all but the first of them the search. A
// record of size 0 is none.
type sole struct {
	record Record
	head   uint64
}

// carries reports whether the record has all of the size bytes from s on.
func (o *sole) carries(s, size uint32) bool {
	into := s - o.record.Seq
	return into < o.record.Size && size <= o.record.Size-into
}

// Begin sets the start of the stream and the early records, oldest first, when the reader is at
// offset now. The Mapper keeps early. missing means that some early records are lost.
//
// Requires: Begin was not called before.
func (m *Mapper) Begin(base uint32, early []Record, missing bool, now int64) {
	m.started, m.base, m.early, m.gap = true, base, early, missing
	m.earlyUntil = now + earlyReach
}

// Lost returns the number of records that were overwritten before they were retired. Not every lost
// record affects a message: the last few records of a long message suffice.
func (m *Mapper) Lost() uint64 { return m.lost }

// Arrival returns when the bytes [start, end) of the stream were complete, or a later time. The
// bytes must have been read, because records of bytes in transit may be missing. The result is:
//   - Exact if each byte has a single record, or is older than a byte with a record;
//   - UpperBound, the time of the latest record, if some bytes have several records;
//   - Overwritten, the time of the oldest remaining record, if all records of the bytes are lost;
//   - not ok if nothing is known.
//
// Requires: start < end; start not below the previous call's start; end - start less than 1 GiB.
func (m *Mapper) Arrival(r Ring, start, end int64) (a Arrival, ok bool) {
	if !m.started {
		return Arrival{}, false
	}
	s := m.base + uint32(start)
	if m.sole.carries(s, uint32(end-start)) && m.sole.head == r.Head() {
		return Arrival{At: m.sole.record.At}, true
	}
	for range maxTries {
		head := r.Head()
		m.catchUp(r, head)
		m.retire(r, head, start, s)
		a, ok = m.find(r, head, s, uint32(end-start))
		if r.Head()-m.next <= r.Size() {
			return a, ok
		}
		// Records were overwritten during the search, perhaps before find read them. Search again.
	}
	return Arrival{}, false
}

// catchUp skips overwritten records. They are newer than the early records, so it drops the early
// records, too.
func (m *Mapper) catchUp(r Ring, head uint64) {
	if size := r.Size(); head-m.next > size {
		m.lost += head - size - m.next
		m.next = head - size
		m.early, m.gap = nil, true
	}
}

// retire drops the records that only carried bytes before s. It stops at the first unpublished
// record, which would be lost otherwise.
func (m *Mapper) retire(r Ring, head uint64, start int64, s uint32) {
	if start >= m.earlyUntil {
		m.early = nil
	}
	for len(m.early) > 0 && !seqBefore(s, m.early[0].end()) {
		if m.early[0].First {
			m.gap = false
		}
		m.early = m.early[1:]
	}
	for m.next < head {
		rec, ok := r.Record(m.next)
		if !ok || seqBefore(s, rec.end()) {
			break
		}
		if rec.First {
			m.gap = false
		}
		m.next++
	}
}

// record returns the i-th remaining record, early records first.
func (m *Mapper) record(r Ring, i uint64) (Record, bool) {
	n := uint64(len(m.early))
	if i < n {
		return m.early[i], true
	}
	return r.Record(m.next + i - n)
}

// find returns the time of the latest record with any of the size bytes from s on. With a gap,
// bytes without a record are older than all remaining records, so they do not affect the latest
// time. Without a gap, a byte without a record makes the result unknown.
func (m *Mapper) find(r Ring, head uint64, s, size uint32) (a Arrival, ok bool) {
	n := uint64(len(m.early)) + head - m.next
	ordered := n > 1 && m.inOrder(r, head, s)
	covered, first := uint64(0), true
	m.sole.record.Size = 0
	for i := range n {
		rec, ok := m.record(r, i)
		if !ok {
			continue
		}
		if c := rec.common(s, size); c > 0 {
			if covered == 0 || a.At.Before(rec.At) {
				a.At = rec.At
			}
			if rec.end()-s > size && c == size && !m.gap && (ordered || n == 1) { // more messages may follow in it
				m.sole = sole{rec, head}
			}
			covered += uint64(c)
			first = first && rec.First
		}
		if ordered && !seqBefore(rec.end(), s+size) {
			break // the other records begin further on
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

// inOrder reports whether the remaining records do not overlap, because each begins at or after the
// end of the previous record. It checks each record once, except the record that is out of order,
// until that record is retired. With early records, which are few and short-lived, inOrder returns
// false.
func (m *Mapper) inOrder(r Ring, head uint64, s uint32) bool {
	if len(m.early) > 0 {
		return false
	}
	if m.sorted <= m.next {
		// The first record may have begun before s.
		m.sorted, m.sortedTo = m.next, s-sizeMask
	}
	for ; m.sorted < head; m.sorted++ {
		rec, ok := r.Record(m.sorted)
		// Compare distances from s. The peer chooses sequence numbers, which could wrap around to
		// the same byte although each step goes forward.
		if from := int32(rec.Seq - s); !ok || from < int32(m.sortedTo-s) || from > maxAhead {
			return false
		}
		m.sortedTo = rec.end()
	}
	return true
}

// oldest returns the time of the oldest remaining record, an upper bound for all lost records.
func (m *Mapper) oldest(r Ring, head uint64) (Arrival, bool) {
	for i := range uint64(len(m.early)) + head - m.next {
		if rec, ok := m.record(r, i); ok {
			return Arrival{At: rec.At, Source: Overwritten}, true
		}
	}
	return Arrival{}, false
}
