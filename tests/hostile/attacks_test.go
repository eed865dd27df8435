package hostile

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"time"
)

// attacks are kept for ever. The figures are of what they did to the others, or
// to the broker, when they were found.
var attacks = []attack{
	{
		// p50 0.1 -> 112 ms: it was parsed by the event loop.
		name: "an IDENTIFY of 5 MB",
		strike: func(ctx context.Context, b *broker) error {
			return b.send(ctx, hugeIdentify)
		},
		every: 50 * time.Millisecond,
	},
}

var hugeIdentify = sized("IDENTIFY\n", `{"more":[`+strings.Repeat("{},", 1_600_000)+`{}]}`)

// sized is a command with a body.
func sized(line, body string) []byte {
	b := binary.BigEndian.AppendUint32([]byte(line), uint32(len(body)))
	return append(b, body...)
}

// send opens a connection, writes, and waits for an answer or the end.
func (b *broker) send(ctx context.Context, what []byte) error {
	nc, err := b.dial()
	if err != nil {
		return err
	}
	defer nc.Close()
	defer context.AfterFunc(ctx, func() { nc.Close() })()
	return ended(write(nc, what))
}

func write(nc net.Conn, what []byte) error {
	if _, err := nc.Write(what); err != nil {
		return err
	}
	_, _, err := frame(nc)
	return err
}

// ended drops the errors of a connection that the broker has ended, or the end of
// the slice.
func ended(err error) error {
	var op *net.OpError
	if errors.As(err, &op) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}
