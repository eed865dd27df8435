package compress_test

import (
	"bufio"
	"bytes"
	stdflate "compress/flate"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/golang/snappy"
	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/compress"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// format is one way to compress, with two decompressors: the reader of NSQ's Go clients, and ours.
type format struct {
	name   string
	packer func() compress.Packer
	theirs func(io.Reader) io.Reader
	ours   func(*bufio.Reader) io.Reader
}

var formats = []format{
	{"snappy", func() compress.Packer { return new(compress.Snappy) }, func(r io.Reader) io.Reader { return snappy.NewReader(r) }, compress.FromSnappy},
	{"deflate, nothing remembered", func() compress.Packer { return compress.NewDeflate(6) }, func(r io.Reader) io.Reader { return stdflate.NewReader(r) }, compress.FromDeflate},
	{"deflate 1", remembering(1), func(r io.Reader) io.Reader { return stdflate.NewReader(r) }, compress.FromDeflate},
	{"deflate 6", remembering(6), func(r io.Reader) io.Reader { return stdflate.NewReader(r) }, compress.FromDeflate},
	{"deflate 9", remembering(9), func(r io.Reader) io.Reader { return stdflate.NewReader(r) }, compress.FromDeflate},
	{"deflate, remembered from the third on", func() compress.Packer { return &late{Deflate: compress.NewDeflate(3)} },
		func(r io.Reader) io.Reader { return stdflate.NewReader(r) }, compress.FromDeflate},
}

func remembering(level int) func() compress.Packer {
	return func() compress.Packer {
		d := compress.NewDeflate(level)
		d.Remember()
		return d
	}
}

// late starts to keep its window in the middle of the stream.
type late struct {
	*compress.Deflate
	n int
}

func (l *late) Append(dst, src []byte) []byte {
	if l.n++; l.n > 2 {
		l.Remember()
	}
	return l.Deflate.Append(dst, src)
}

// errDry is returned by a source that has no data yet and would block.
var errDry = errors.New("nothing more has come")

// source returns its buffered data, then errDry.
type source struct{ bytes.Buffer }

func (s *source) Read(p []byte) (int, error) {
	if s.Len() == 0 {
		return 0, errDry
	}
	return s.Buffer.Read(p)
}

// check compresses the pieces one after the other. After each piece, both decompressors must be able to read the whole
// piece without further input.
func check(f format, pieces [][]byte) error {
	p := f.packer()
	var wire [2]source
	unpack := [2]io.Reader{f.theirs(&wire[0]), f.ours(bufio.NewReaderSize(&wire[1], 16))}
	for i, piece := range pieces {
		const before = "before"
		out := p.Append([]byte(before), piece)
		if !bytes.HasPrefix(out, []byte(before)) {
			return fmt.Errorf("%s: piece %d overwrote what was there", f.name, i)
		}
		for side := range unpack {
			wire[side].Write(out[len(before):])
			got := make([]byte, len(piece))
			if _, err := io.ReadFull(unpack[side], got); err != nil {
				return fmt.Errorf("%s: side %d, piece %d of %d bytes: %w", f.name, side, i, len(piece), err)
			}
			if !bytes.Equal(got, piece) {
				return fmt.Errorf("%s: side %d, piece %d differs", f.name, side, i)
			}
		}
	}
	return nil
}

func TestPeersReadEachPieceAtOnce(t *testing.T) {
	rng := testkit.Rand(t)
	noise := make([]byte, 200_000)
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	for _, f := range formats {
		pieces := [][]byte{[]byte("OK"), {}, []byte("x"), bytes.Repeat([]byte("sensor 17 value 22.5;"), 20_000), noise, noise[:65536], noise[:65537], []byte("OK")}
		testkit.NoError(t, check(f, pieces))
	}
}

func TestAnyPieces(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		rng := rand.New(rand.NewPCG(seed, 0))
		pieces := make([][]byte, rapid.IntRange(1, 8).Draw(t, "pieces"))
		for i := range pieces {
			pieces[i] = make([]byte, rapid.IntRange(0, 3000).Draw(t, "size"))
			alphabet := rapid.IntRange(1, 256).Draw(t, "alphabet")
			for j := range pieces[i] {
				pieces[i][j] = byte(rng.IntN(alphabet))
			}
		}
		testkit.Must(t, check(formats[rapid.IntRange(0, len(formats)-1).Draw(t, "format")], pieces))
	})
}

func TestSnappyIsTheDocumentedFormat(t *testing.T) {
	// A stream identifier, then a chunk of plain data after its checksum. (check, above, verifies the checksum with the
	// peers' decompressors.)
	var s compress.Snappy
	got := s.Append(nil, []byte("OK"))
	if !bytes.HasPrefix(got, []byte("\xff\x06\x00\x00sNaPpY"+"\x01\x06\x00\x00")) || len(got) != 20 || !bytes.HasSuffix(got, []byte("OK")) {
		t.Errorf("%x", got)
	}
	if next := s.Append(nil, []byte("OK")); !bytes.Equal(next, got[10:]) {
		t.Errorf("%x, want %x without another identifier", next, got[10:])
	}
	zeros := s.Append(nil, make([]byte, 1000))
	if zeros[0] != 0 || len(zeros) > 100 {
		t.Errorf("1000 zeros became a chunk of type %d with %d bytes", zeros[0], len(zeros))
	}
}

func TestRepetitionIsRemembered(t *testing.T) {
	msg := make([]byte, 300)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range msg {
		msg[i] = byte(rng.Uint32())
	}
	for _, level := range []int{1, 5, 6, 9} {
		d := compress.NewDeflate(level)
		d.Remember()
		first, second := len(d.Append(nil, msg)), len(d.Append(nil, msg))
		if second > first/4 {
			t.Errorf("level %d: a message of %d bytes takes %d, and %d again", level, len(msg), first, second)
		}
	}
}

func TestPackingSnappyAllocatesNothing(t *testing.T) {
	var s compress.Snappy
	msg := bytes.Repeat([]byte("sensor 17;"), 10)
	out := make([]byte, 0, 4096)
	testkit.Equal(t, testing.AllocsPerRun(100, func() { out = s.Append(out[:0], msg) }), 0, "allocations")
}

func TestLevelsOutOfRangeArePanics(t *testing.T) {
	for _, level := range []int{-1, 0, 10} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("level %d was taken", level)
				}
			}()
			compress.NewDeflate(level)
		}()
	}
}

// For any input, decompression ends, and returns the same end again.
func FuzzUnpack(f *testing.F) {
	for _, format := range formats {
		f.Add(format.packer().Append(nil, []byte("a message, a message, a message")))
	}
	f.Add([]byte("\xff\x06\x00\x00sNaPpY\x00\xff\xff\xff"))
	f.Add([]byte("\xff\x06\x00\x00S2sTwO\x00\x09\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff\x0f"))
	f.Add([]byte("\x00\x00\x00\xff\xff"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, in []byte) {
		for _, open := range []func(*bufio.Reader) io.Reader{compress.FromSnappy, compress.FromDeflate} {
			r := open(bufio.NewReader(bytes.NewReader(in)))
			const most = 1 << 22
			n, err := io.Copy(io.Discard, io.LimitReader(r, most))
			if err == nil && n < most {
				if _, err := r.Read(make([]byte, 1)); err == nil {
					t.Fatal("a stream that ended continues")
				}
			}
		}
	})
}
