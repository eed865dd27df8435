// Package frames reads a broker's frames one at a time, for clients that wait for each
// frame: the library, the load generator, the calibration and tests. Package nsq/wire has
// the codec.
package frames

import (
	"io"

	"github.com/srtm-io/srtm/nsq/wire"
)

// Read reads the next frame of r and no further bytes. It refuses what wire.ParseFrame
// refuses, and refuses an oversized frame before allocating. The caller owns data. The
// error is io.EOF only if r ends before a frame begins.
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
