package hook_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
)

// stream returns the bytes of TLS records with payloads of the given sizes, and the end of each record.
func stream(sizes []uint16) (bytes []byte, ends []int64) {
	for i, n := range sizes {
		bytes = append(bytes, 23, 3, 3)
		bytes = binary.BigEndian.AppendUint16(bytes, n)
		for range n {
			bytes = append(bytes, byte(i))
		}
		ends = append(ends, int64(len(bytes)))
	}
	return bytes, ends
}

// fixedConn is a connection that reads from r.
type fixedConn struct {
	net.Conn
	r io.Reader
}

func (c fixedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

func checkRecords(t *testing.T, in []byte, ends []int64, r io.Reader, piece int) {
	t.Helper()
	s := open(t, hook.Off, hook.Config{})
	x := s.Track(fixedConn{r: r}).Records()
	var out []byte
	p := make([]byte, piece)
	for {
		before := x.Offset()
		n, err := x.Read(p)
		out = append(out, p[:n]...)
		testkit.MustEqual(t, x.Offset(), before+int64(n), "offset after %d bytes from %d", n, before)
		i, _ := slices.BinarySearch(ends, before+1) // the record in progress
		if i < len(ends) && x.Offset() > ends[i] {
			t.Fatalf("a read from %d to %d goes past the record that ends at %d", before, x.Offset(), ends[i])
		}
		if err == io.EOF {
			break
		}
		testkit.Must(t, err)
		if n == 0 {
			t.Fatal("a read of nothing")
		}
	}
	if !bytes.Equal(in, out) {
		t.Fatalf("%d bytes became %d others", len(in), len(out))
	}
}

func TestRecordsAreHandedOutOneByOne(t *testing.T) {
	in, ends := stream([]uint16{10, 0, 1, 5000, 3, 2043, 2048, 16384, 7})
	for _, piece := range []int{1, 4, 5, 600, 5000, 1 << 16} {
		checkRecords(t, in, ends, bytes.NewReader(in), piece)
		checkRecords(t, in, ends, iotest.OneByteReader(bytes.NewReader(in)), piece)
		checkRecords(t, in, ends, iotest.DataErrReader(bytes.NewReader(in)), piece)
	}
	// The connection ends within a record, and within a header.
	checkRecords(t, in[:1000], ends, bytes.NewReader(in[:1000]), 600)
	checkRecords(t, in[:18], ends, bytes.NewReader(in[:18]), 600)
}

// passing returns, on every second read, that no data is available now, as a socket of an event loop does.
type passing struct {
	r    io.Reader
	full bool
}

func (p *passing) Read(b []byte) (int, error) {
	if p.full = !p.full; p.full {
		return 0, os.ErrDeadlineExceeded
	}
	return p.r.Read(b)
}

// The layer joins a header that comes in pieces.
func TestRecordsEndWhereTheyDoAfterPauses(t *testing.T) {
	in, ends := stream([]uint16{10, 0, 300, 3})
	x := open(t, hook.Off, hook.Config{}).Track(fixedConn{r: &passing{r: iotest.OneByteReader(bytes.NewReader(in))}}).Records()
	var out []byte
	for len(out) < len(in) {
		before, p := x.Offset(), make([]byte, 1000)
		n, err := x.Read(p)
		if out = append(out, p[:n]...); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
		if n > 0 && n < 5 && !slices.Contains(ends, before+int64(n)) && (before == 0 || slices.Contains(ends, before)) {
			t.Fatalf("%d bytes at %d: a piece of a header", n, before)
		}
	}
	if !bytes.Equal(in, out) {
		t.Errorf("%v became %v", in, out)
	}
}

func FuzzRecords(f *testing.F) {
	in, _ := stream([]uint16{10, 0, 300})
	f.Add(in, uint16(7))
	f.Add([]byte{22, 3, 1}, uint16(1))
	f.Add(bytes.Repeat([]byte{255}, 100), uint16(100))
	f.Fuzz(func(t *testing.T, in []byte, piece uint16) {
		var ends []int64
		for at := 0; len(in)-at >= 5; {
			at += 5 + int(binary.BigEndian.Uint16(in[at+3:]))
			ends = append(ends, int64(at))
		}
		checkRecords(t, in, ends, bytes.NewReader(in), int(piece)+1)
	})
}

func TestRecordsGoOnAfterADeadline(t *testing.T) {
	s := open(t, hook.Off, hook.Config{})
	in, _ := stream([]uint16{10})
	r := io.MultiReader(bytes.NewReader(in[:2]), iotest.TimeoutReader(bytes.NewReader(in[2:])))
	x := s.Track(fixedConn{r: iotest.OneByteReader(r)}).Records()
	var out []byte
	for len(out) < len(in) {
		p := make([]byte, 100)
		n, err := x.Read(p)
		out = append(out, p[:n]...)
		if err != nil && err != iotest.ErrTimeout {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(in, out) {
		t.Errorf("%v became %v", in, out)
	}
}
