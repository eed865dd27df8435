package commitlog

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
)

// errDamaged means that the expected record is not a record.
var errDamaged = errors.New("damaged record")

var errWindow = errors.New("not in memory")

// walker steps through the records between two places in a segment's file.
type walker struct {
	layout
	r      io.ReaderAt
	off    int64 // of the next record
	end    int64
	window int // bytes to read at a time, unless a record needs more

	buf []byte // the last read bytes
	at  int64  // place of buf
	// fixed keeps buf unchanged, because the caller uses records in it. next then returns
	// errWindow for a record outside buf.
	fixed bool
	batch *Batch // provides the memory for buf; nil: walker allocates
}

// next returns the record at off and steps over it. Errors: io.EOF at the end, errDamaged if
// there is no record at off, otherwise the file's error. An error does not move off. The next
// call may overwrite the record unless fixed is set.
func (w *walker) next() ([]byte, error) {
	if w.off >= w.end {
		return nil, io.EOF
	}
	b, err := w.peek(recordExtra)
	if err != nil {
		return nil, err
	}
	size, ok := w.size(b, w.off, w.end)
	if !ok {
		return nil, errDamaged
	}
	if b, err = w.peek(size); err != nil {
		return nil, err
	}
	b = b[:size:size]
	if !w.intact(b, w.off) {
		return nil, errDamaged
	}
	w.off += size
	return b[recordExtra:], nil
}

// grow returns buf with length n. The previous content is lost.
func (w *walker) grow(n int) []byte {
	if w.batch != nil {
		return w.batch.Buffer(n)
	}
	if cap(w.buf) < n {
		return make([]byte, n)
	}
	return w.buf[:n]
}

// peek returns n or more bytes from off. Error: errDamaged if they would end after w.end or after
// the end of the file.
func (w *walker) peek(n int64) ([]byte, error) {
	if w.off+n > w.end {
		return nil, errDamaged
	}
	if from := w.off - w.at; from >= 0 && from+n <= int64(len(w.buf)) {
		return w.buf[from:], nil
	}
	if w.fixed {
		return nil, errWindow
	}
	size := min(max(n, int64(w.window)), w.end-w.off)
	w.buf, w.at = w.grow(int(size)), w.off
	got, err := w.r.ReadAt(w.buf, w.off)
	w.buf = w.buf[:got]
	if int64(got) >= n {
		return w.buf, nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = errDamaged
	}
	return nil, err
}

// searchBudget bounds the bytes that search checksums. Random bytes that look like a record's
// length cost as much as the record.
const searchBudget = 1 << 30

// evidence is the result of a search behind a damaged record.
type evidence uint8

const (
	nothing  evidence = iota // no intact record
	possible                 // a possible record, not enough to continue
	certain                  // records are readable again
)

// search finds the place after a damaged record at off where records are readable again: an
// intact record followed by another record or by end. A single intact record is only possible,
// because over many offsets a 32-bit checksum matches once by chance. When the budget is used up,
// the result is possible, too.
func (l layout) search(r io.ReaderAt, off, end int64) (int64, evidence, error) {
	s := searcher{layout: l, r: r, end: end, budget: searchBudget, scratch: make([]byte, min(64<<10, max(end-off, recordExtra)))}

	// The usual damage leaves the length intact.
	var head [recordExtra]byte
	if n, err := readFull(r, head[:], off); err != nil {
		return 0, nothing, err
	} else if n == len(head) {
		if size, ok := l.size(head[:], off, end); ok {
			if found, err := s.try(off + size); err != nil || found == certain {
				return off + size, found, err
			}
		}
	}

	var best evidence
	window := make([]byte, min(1<<20, max(end-off, 0)))
	for at := off + 1; at+recordExtra < end; {
		n, err := readFull(r, window[:min(int64(len(window)), end-at)], at)
		if err != nil {
			return 0, nothing, err
		}
		if n <= recordExtra {
			break
		}
		steps := n - recordExtra // the next window begins with the rest
		for i := range steps {
			if _, ok := l.size(window[i:], at+int64(i), end); !ok {
				continue
			}
			found, err := s.try(at + int64(i))
			if err != nil || found == certain {
				return at + int64(i), found, err
			}
			best = max(best, found)
			if s.budget <= 0 {
				return 0, possible, nil
			}
		}
		at += int64(steps)
	}
	return 0, best, nil
}

type searcher struct {
	layout
	r       io.ReaderAt
	end     int64
	budget  int64
	scratch []byte
}

// try returns the evidence given by a possible record at off.
func (s *searcher) try(off int64) (evidence, error) {
	next, ok, err := s.record(off)
	if err != nil || !ok {
		return nothing, err
	}
	if next < s.end {
		if _, ok, err = s.record(next); err != nil || !ok {
			return possible, err
		}
	}
	return certain, nil
}

// record reports whether there is an intact record at off, and its end.
func (s *searcher) record(off int64) (end int64, ok bool, err error) {
	b := s.scratch
	n, err := readFull(s.r, b[:min(int64(len(b)), max(0, s.end-off))], off)
	if err != nil || n < recordExtra {
		return 0, false, err
	}
	size, ok := s.size(b, off, s.end)
	if !ok {
		return 0, false, nil
	}
	s.budget -= size
	want := binary.BigEndian.Uint32(b) ^ uint32(off)
	sum := crc32.Update(s.seed, castagnoli, b[4:min(int64(n), size)])
	for at := int64(n); at < size; at += int64(n) {
		if n, err = readFull(s.r, b[:min(int64(len(b)), size-at)], off+at); err != nil || n == 0 {
			return 0, false, err
		}
		sum = crc32.Update(sum, castagnoli, b[:n])
	}
	return off + size, sum == want, nil
}

// readFull reads as much of b as the file has.
func readFull(r io.ReaderAt, b []byte, off int64) (int, error) {
	n, err := r.ReadAt(b, off)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}
