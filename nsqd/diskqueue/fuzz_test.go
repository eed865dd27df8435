package diskqueue

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"testing"
)

// segmentOf returns a segment's file with the records, sealed or not.
func segmentOf(sealed bool, records ...[]byte) []byte {
	id := identity{number: 1, salt: 0x0123456789abcdef, maxRecord: 1 << 12}
	b := id.layout().appendRecords(appendHeader(nil, id), records, headerSize)
	if sealed {
		b = appendFooter(b, id, int64(len(records)), int64(len(b)))
	}
	return b
}

// fuzzRecords are those of the segments that are damaged.
func fuzzRecords() [][]byte {
	var records [][]byte
	for id := uint64(1); id <= 20; id++ {
		records = append(records, payload(id))
	}
	return records
}

// A segment's file is damaged in any way: bytes changed, cut out, put in, moved.
// The queue opens, and what it gives back are records that were appended, in
// their order, and all of those before the first damage. What is appended then is
// read after them, now and after another start.
func FuzzDamagedSegment(f *testing.F) {
	f.Add(true, []byte{})
	f.Add(false, []byte{})
	f.Add(true, []byte{0, 0, 200, 0, 1})           // change a byte
	f.Add(false, []byte{1, 0, 100, 0, 50})         // cut something out
	f.Add(false, []byte{2, 0, 100, 0, 50})         // put zeros in
	f.Add(true, []byte{3, 0, 36, 1, 0})            // repeat a piece
	f.Add(false, []byte{4, 1, 0, 0, 0})            // cut the end off
	f.Add(true, []byte{0, 0, 12, 0, 1})            // in the header
	f.Add(true, []byte{0, 0, 9, 0, 1, 4, 2, 0, 0}) // in the header, and no footer
	f.Fuzz(func(t *testing.T, sealed bool, edits []byte) {
		records := fuzzRecords()
		content := segmentOf(sealed, records...)
		first := len(content) // changed
		for n := 0; len(edits) >= 5 && n < 20; n++ {
			kind, at, size := edits[0], int(binary.BigEndian.Uint16(edits[1:])), int(binary.BigEndian.Uint16(edits[3:]))
			edits = edits[5:]
			if at >= len(content) {
				continue
			}
			first = min(first, at)
			end := min(len(content), at+size)
			switch kind % 5 {
			case 0:
				content[at] ^= byte(size)
			case 1:
				content = append(content[:at:at], content[end:]...)
			case 2:
				content = append(append(content[:at:at], make([]byte, size)...), content[at:]...)
			case 3:
				content = append(append(content[:at:at], content[at:end]...), content[at:]...)
			case 4:
				content = content[:at]
			}
		}

		sim := newSimDisk(rand.New(rand.NewPCG(1, 1)))
		cfg := Config{Name: "q", SegmentBytes: 1 << 10, MaxRecord: 1 << 12}
		start := func() *Queue {
			sim.kill()
			dir, err := OpenDir("/data", sim.disk())
			if err != nil {
				t.Fatal(err)
			}
			cfg.Dir = dir
			q, err := Open(cfg)
			if err != nil {
				t.Fatal(err)
			}
			return q
		}
		start() // makes the folder
		if err := sim.disk().Mkdir("/data/q.queue"); err != nil {
			t.Fatal(err)
		}
		sim.edit("/data/q.queue/"+segmentName(1), func([]byte) []byte { return content })

		q := start()
		got := drain(t, q)
		intact, off := 0, headerSize
		for _, r := range records {
			if off += recordExtra + len(r); off > first || first < headerSize {
				break
			}
			intact++
		}
		next := 0
		for i, r := range got {
			for next < len(records) && !bytes.Equal(records[next], r) {
				next++
			}
			if next == len(records) {
				t.Fatalf("record %d, %x, is not one that was appended, or out of order", i, r)
			}
			next++
			if i < intact && next != i+1 {
				t.Fatalf("record %d is lost; nothing before offset %d was changed", i, first)
			}
		}
		if len(got) < intact {
			t.Fatalf("%d records, but %d are before offset %d, the first that was changed", len(got), intact, first)
		}

		if _, err := q.Append([]byte("later")); err != nil {
			t.Fatal(err)
		}
		want := append(got, []byte("later"))
		q.Rewind()
		for range 2 {
			again := drain(t, q)
			if len(again) != len(want) {
				t.Fatalf("%d records, then %d", len(want), len(again))
			}
			for i := range want {
				if !bytes.Equal(again[i], want[i]) {
					t.Fatalf("record %d is %x, was %x", i, again[i], want[i])
				}
			}
			q = start()
		}
	})
}

func drain(t *testing.T, q *Queue) (all [][]byte) {
	t.Helper()
	for {
		records, err := q.Read(6, 500, nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(records) == 0 {
			return all
		}
		for _, r := range records {
			all = append(all, r.Data)
		}
	}
}

// Any bytes at all, as each of the files: nothing panics, and what is parsed
// encodes to the bytes it was parsed from.
func FuzzParse(f *testing.F) {
	f.Add(segmentOf(true, []byte("a"), []byte("bc")))
	f.Add(segmentOf(false, []byte("a")))
	f.Add(appendCursor(nil, Position{3, 4711, 42}))
	f.Add([]byte(segmentMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, ok, err := parseCursor(b); ok && (err != nil || !bytes.Equal(appendCursor(nil, p), b)) {
			t.Fatalf("cursor %v, %v of %x", p, err, b)
		}
		l := identity{number: 1, salt: 0x0123456789abcdef, maxRecord: 1 << 12}.layout()
		if len(b) >= headerSize {
			if id, ok, err := parseHeader(b[:headerSize]); ok {
				if err != nil || !bytes.Equal(appendHeader(nil, id), b[:headerSize]) {
					t.Fatalf("header %+v, %v of %x", id, err, b[:headerSize])
				}
				l = id.layout()
			}
		}
		if at := len(b) - footerSize; at >= headerSize {
			if id, n, ok := parseFooter(b[at:], int64(at)); ok && !bytes.Equal(appendFooter(nil, id, n, int64(at)), b[at:]) {
				t.Fatalf("footer %+v, %d of %x", id, n, b[at:])
			}
		}
		if len(b) < headerSize {
			return
		}
		w := walker{layout: l, r: bytes.NewReader(b), off: headerSize, end: int64(len(b)), window: 1 + len(b)%100}
		for {
			from := w.off
			data, err := w.next()
			if err != nil {
				if err != io.EOF && err != errDamaged {
					t.Fatal(err)
				}
				break
			}
			if !bytes.Equal(l.appendRecord(nil, data, from), b[from:w.off]) {
				t.Fatalf("record %x at %d of %x", data, from, b)
			}
		}
		found, err := l.survey(bytes.NewReader(b), int64(len(b)))
		if err != nil || found.end > int64(len(b)) || found.end < headerSize {
			t.Fatalf("%+v, %v of %x", found, err, b)
		}
	})
}
