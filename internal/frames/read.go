// Package frames reads what a broker sends one frame at a time, for clients that wait for
// each: the library, the load generator, the calibration and tests. The codec is nsq/wire's.
package frames

import (
	"io"

	"github.com/srtm-io/srtm/nsq/wire"
)

// Read reads the frame that r has next, and nothing beyond it, for a client that
// waits for one at a time. It refuses what wire.ParseFrame does, and before it allocates for a
// frame that is too large. data is the caller's. The error is io.EOF only where r ends
// before a frame begins.
func Read(r io.Reader, limit int) (t wire.FrameType, data []byte, err error) {
	var head [wire.FrameOverhead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	size, err := wire.FrameSize(head[:], limit)
	if err != nil {
		return 0, nil, err
	}
	frame := make([]byte, size)
	if _, err := io.ReadFull(r, frame[copy(frame, head[:]):]); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	t, data, _, err = wire.ParseFrame(frame, limit)
	return t, data, err
}
