package frames_test

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// FuzzRead: Read returns exactly the frame that ParseFrame accepts, and refuses what ParseFrame
// refuses. Read distinguishes an early end from an end between frames.
func FuzzRead(f *testing.F) {
	f.Add(wire.AppendResponse(nil, wire.OK))
	f.Add(wire.AppendMessage(nil, 1, 1, wire.MessageID{}, []byte("body")))
	f.Add([]byte{255, 255, 255, 255, 0, 0, 0, 0})
	f.Add([]byte{0, 0, 0, 20, 0, 0, 0, 2, 1, 2, 3})
	f.Fuzz(func(t *testing.T, in []byte) {
		const limit = 256
		kind, data, n, refused := wire.ParseFrame(in, limit)
		r := bytes.NewReader(in)
		rkind, rdata, err := frames.Read(iotest.OneByteReader(r), limit)
		if rkind != kind || !bytes.Equal(rdata, data) || (err == nil) != (n > 0) {
			t.Fatalf("read %v %q %v, parsed %v %q of %d bytes", rkind, rdata, err, kind, data, n)
		}
		switch {
		case err == nil:
			if read := len(in) - r.Len(); read != n {
				t.Fatalf("%d bytes are read of a frame of %d", read, n)
			}
		case errors.Is(err, wire.ErrFrame):
			if refused == nil {
				t.Fatalf("%v, which ParseFrame does not refuse", err)
			}
		case len(in) == 0:
			testkit.MustEqual(t, err, io.EOF, "no frame")
		case err != io.ErrUnexpectedEOF:
			t.Fatalf("%d bytes of a frame: %v", len(in), err)
		}
	})
}
