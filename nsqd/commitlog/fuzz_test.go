package commitlog

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// segmentOf returns a segment's file with the records, sealed or not, and the end of each record.
func segmentOf(sealed bool, records []Record) (b []byte, ends []int) {
	id := identity{before: noSegment, salt: 0x0123456789abcdef, maxRecord: 1 << 12}
	l := id.layout()
	b = appendHeader(nil, id, withAttributes)
	var e extent
	for i := range records {
		records[i].Offset = Offset(i)
		b = l.appendRecord(b, &records[i], 0, int64(len(b)))
		e.add(records[i].Offset, records[i].Timestamp)
		ends = append(ends, len(b))
	}
	if sealed {
		b = appendFooter(b, id, e, int64(len(b)))
	}
	return b, ends
}

// The fuzzer damages a segment's file: it changes, cuts, inserts and moves bytes. The log opens and returns only
// appended records at their offsets, including every record before the first damage. Records appended later come after
// these records, also after another start.
func FuzzDamagedSegment(f *testing.F) {
	f.Add(true, []byte{})
	f.Add(false, []byte{})
	f.Add(true, []byte{0, 0, 200, 0, 1})           // change a byte
	f.Add(false, []byte{1, 0, 100, 0, 50})         // cut something out
	f.Add(false, []byte{2, 0, 100, 0, 50})         // put zeros in
	f.Add(true, []byte{3, 0, 44, 1, 0})            // repeat a piece
	f.Add(false, []byte{4, 1, 0, 0, 0})            // cut the end off
	f.Add(true, []byte{0, 0, 12, 0, 1})            // in the header
	f.Add(true, []byte{0, 0, 9, 0, 1, 4, 2, 0, 0}) // in the header, and no footer
	f.Fuzz(func(t *testing.T, sealed bool, edits []byte) {
		var records []Record
		for id := range uint64(20) {
			records = append(records, numbered(id+1))
		}
		content, ends := segmentOf(sealed, records)
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
		start := func() *Files {
			sim.kill()
			dir := testkit.Result(OpenDir("/data", sim.disk())).Must(t)
			return testkit.Result(Open(Config{Dir: dir, Name: "q", SegmentBytes: 1 << 10, MaxBody: 1 << 12})).Must(t)
		}
		start() // creates the folder
		testkit.Must(t, sim.disk().Mkdir("/data/q.log"))
		sim.edit("/data/q.log/"+segmentName(0), func([]byte) []byte { return content })

		l := start()
		got := drain(t, l)
		there := map[Offset]bool{}
		for _, r := range got {
			id, err := numberOf(r)
			if err != nil || Offset(id-1) != r.Offset {
				t.Fatalf("record %+v, %v", r, err)
			}
			there[r.Offset] = true
		}
		for i, end := range ends {
			if first >= headerSize && end <= first && !there[Offset(i)] {
				t.Fatalf("record %d is lost; nothing before %d was changed", i, first)
			}
		}

		later := []Record{numbered(99)}
		at := testkit.Result(l.Append(later)).Must(t)
		if n := len(got); n > 0 && at <= got[n-1].Offset {
			t.Fatalf("appended at %d after %d", at, got[n-1].Offset)
		}
		want := append(got, later[0])
		for range 2 {
			again := drain(t, l)
			if len(again) != len(want) {
				t.Fatalf("%d records, then %d", len(want), len(again))
			}
			for i := range want {
				if !same(again[i], want[i]) {
					t.Fatalf("record %d is %+v, was %+v", i, again[i], want[i])
				}
			}
			l = start()
		}
	})
}

func drain(t *testing.T, l *Files) (all []Record) {
	t.Helper()
	var b Batch
	for {
		testkit.Must(t, l.Read(b.Next, Limit{Records: 3, Bytes: 1 << 20}, &b))
		if len(b.Records) == 0 {
			return all
		}
		for _, r := range b.Records {
			r.Body, r.Channel, r.Attribute = bytes.Clone(r.Body), bytes.Clone(r.Channel), bytes.Clone(r.Attribute)
			all = append(all, r)
		}
	}
}

// appendRecord writes the same bytes that ParseData reads, unless the input had bytes after the record.
func FuzzRecord(f *testing.F) {
	for id := range uint64(20) {
		r := numbered(id)
		f.Add(layout{}.appendRecord(nil, &r, 0, 0)[recordExtra:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var r Record
		if !ParseData(b, 1000, &r) {
			return
		}
		again := layout{}.appendRecord(nil, &r, 1000, 0)[recordExtra:]
		var back Record
		if !ParseData(again, 1000, &back) || !same(r, back) || int64(len(again)) != sizeOf(&r)-recordExtra || len(again) > len(b) {
			t.Errorf("%x is %+v, which is written %x", b, r, again)
		}
	})
}

// The cursor files may have any content.
func FuzzSnapshot(f *testing.F) {
	f.Add(appendSnapshot(nil, snapshot{number: 3, next: 5, data: []byte("text")}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, ok, err := parseSnapshot(b)
		if !ok {
			return
		}
		if again := appendSnapshot(nil, s); err != nil || !bytes.Equal(again, b[:len(again)]) {
			t.Errorf("%x is %+v, which is written %x, %v", b, s, again, err)
		}
	})
}

// The format does not change without a new version.
func TestRecordAsItIsDrawn(t *testing.T) {
	r := Record{Offset: 12, Timestamp: 0x0102030405060708, Arrival: 9, Source: stamp.Read, Attempts: 0x1112, Due: 10, Access: time.Duration(11),
		Channel: []byte("ch"), Body: []byte("body")}
	copy(r.ID[:], "0123456789abcdef")
	l := identity{base: 10, salt: 7, maxRecord: 100}.layout()
	want := []byte("....\x00\x00\x00\x3f\x07\x03\x11\x12\x00\x00\x00\x020123456789abcdef\x01\x02\x03\x04\x05\x06\x07\x08" +
		"\x00\x00\x00\x00\x00\x00\x00\x09\x00\x00\x00\x00\x00\x00\x00\x0a\x00\x00\x00\x00\x00\x00\x00\x0b\x02chbody")
	got := l.appendRecord(nil, &r, 10, 44)
	copy(want, "\x0d\x10\x52\x5c")
	if !bytes.Equal(got, want) {
		t.Errorf("\n%q, want\n%q", got, want)
	}
	r.Attribute = []byte("attr")
	want = []byte("\x0f" + string(want[9:recordExtra+dataHeader+19]) + "\x04attrbody")
	if got = AppendData(nil, &r, 10); !bytes.Equal(got, want) {
		t.Errorf("with an attribute\n%q, want\n%q", got, want)
	}
}
