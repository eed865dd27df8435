package diskqueue

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// What a queue writes, byte for byte: files that are there must stay readable.
func TestFormat(t *testing.T) {
	sim := newSimDisk(rand.New(rand.NewPCG(1, 1)))
	dir, err := OpenDir("/data", sim.disk())
	if err != nil {
		t.Fatal(err)
	}
	dir.salt = func() uint64 { return 0x0123456789abcdef }
	q, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 1 << 10, MaxRecord: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	long := []byte(strings.Repeat("0123456789", 94))
	for _, batch := range [][][]byte{{[]byte("one"), []byte("two")}, {{0}}, {long}, {[]byte("three")}} {
		if _, err := q.Append(batch...); err != nil {
			t.Fatal(err)
		}
	}
	records, err := q.Read(2, 100, nil)
	if err != nil {
		t.Fatal(err)
	}
	q.Release(records[1].End)
	if err := q.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	for name, golden := range map[string]string{
		segmentName(1): "sealed segment",
		segmentName(2): "open segment",
		cursorName:     "cursor",
	} {
		dump := []byte(golden + "\n" + hex.Dump(sim.content("/data/q.queue/"+name)))
		testkit.Golden(t, "testdata/"+strings.ReplaceAll(golden, " ", "_")+".hex", dump)
	}

	// And the drawing in format.go says the same.
	b := sim.content("/data/q.queue/" + segmentName(1))
	one := headerSize + recordExtra + 3
	for _, c := range []struct {
		what string
		got  []byte
		want string
	}{
		{"magic", b[0:8], "SRTMSEG\n"},
		{"version", b[8:12], "\x00\x00\x00\x01"},
		{"number", b[12:20], "\x00\x00\x00\x00\x00\x00\x00\x01"},
		{"salt", b[20:28], "\x01\x23\x45\x67\x89\xab\xcd\xef"},
		{"greatest length", b[28:32], "\x00\x10\x00\x00"},
		{"length of the first", b[36+4 : 36+8], "\x00\x00\x00\x03"},
		{"data of the first", b[36+8 : one], "one"},
		{"data of the second", b[one+8 : one+11], "two"},
		{"mark of the footer", b[len(b)-40 : len(b)-36], "\xff\xff\xff\xff"},
		{"records in the footer", b[len(b)-16 : len(b)-8], "\x00\x00\x00\x00\x00\x00\x00\x04"},
		{"magic of the footer", b[len(b)-8:], "SRTMEND\n"},
	} {
		if !bytes.Equal(c.got, []byte(c.want)) {
			t.Errorf("%s is %x, want %x", c.what, c.got, c.want)
		}
	}
}
