package conn

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/compress"
)

// The layers of a connection, outermost first. Each exists if it was negotiated. Arrival times pass
// upwards through the offsets of each layer.
//
//	reading: socket - hook.Conn - TLS, hook.Layer - unpackReader, decompressor, hook.Layer - session
//	writing: session and writer - packer - TLS - socket

// stream is a layer from which a client's bytes are read. Offsets count the bytes of that layer.
type stream interface {
	Read(p []byte) (int, error)
	Offset() int64
	Arrival(start, end int64) stamp.Arrival
	Layer(io.Reader) *hook.Layer
	Ignore()
	Release()
}

// handshakeTimeout limits a client's TLS handshake.
const handshakeTimeout = 10 * time.Second

// unpackBuffer is the read-ahead of a decompressor; each compressed connection keeps a buffer of
// this size.
const unpackBuffer = 2 << 10

// Limits of one connection's decompression. A megabyte of "NOP" compresses to one kilobyte. Without
// limits its sender would occupy a processor, and the event loops would wait. Data up to
// unpackRatio is ordinary, and costs its sender network traffic.
const (
	unpackRatio = 8        // free bytes for each compressed byte
	unpackRate  = 8 << 20  // further bytes per second
	unpackBurst = 64 << 10 // further bytes at once, plus the rest of a read
)

// pace limits a connection's decompression rate. The zero value is ready.
type pace struct{ free mono.Time } // time at which all bytes so far are paid for

// delay returns how long to wait after a decompression. Sizes are in bytes.
func (p *pace) delay(now mono.Time, decompressed, compressed int) time.Duration {
	p.free = max(p.free, now.Add(-unpackBurst*time.Second/unpackRate))
	p.free = p.free.Add(time.Duration(decompressed-unpackRatio*compressed) * time.Second / unpackRate)
	return max(0, p.free.Sub(now))
}

// upgrade wraps the stream as op requires. Requires: the output is written, the buffer is empty.
func (g *goroutine) upgrade(op session.Op) error {
	switch op.Kind {
	case session.OpTLS:
		return g.upgradeTLS()
	case session.OpSnappy:
		g.unpack(compress.FromSnappy, new(compress.Snappy))
	case session.OpDeflate:
		g.unpack(compress.FromDeflate, compress.NewDeflate(op.Level))
	}
	return nil
}

func (g *goroutine) upgradeTLS() error {
	raw, ok := g.client.in.(*hook.Conn)
	if !ok {
		panic("conn: TLS is the first of the upgrades")
	}
	g.deadline = 0 // the next read sets its own
	if err := g.nc.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return fmt.Errorf("deadline: %w", err)
	}
	records := raw.Records()
	t := tls.Server(records, g.client.env.cfg.TLS)
	if err := handshake(g.client, t); err != nil {
		return err
	}
	g.client.in = records.Layer(t)
	g.sendThroughTLS(t)
	return nil
}

// sendThroughTLS sends all later output through TLS.
func (g *goroutine) sendThroughTLS(t *tls.Conn) {
	g.writeMu.Lock()
	defer g.writeMu.Unlock()
	g.tls, g.out = t, t
}

// handshake performs the TLS handshake and records the state of TLS. The connection ends with the
// client's certificate. handshake returns a *wire.Error if the client can still read an error frame.
func handshake(c *client, t *tls.Conn) error {
	if err := t.Handshake(); err != nil {
		var plain tls.RecordHeaderError
		if errors.As(err, &plain) && plain.Conn != nil {
			// A client that continues in plain text can read the error.
			return wire.Wrap(wire.CodeIdentifyFailed, "IDENTIFY got TLS granted and no handshake came", err)
		}
		return err // for the log; the peer cannot read a frame now
	}
	state := t.ConnectionState()
	c.stats.tls.Store(&state)
	if c.env.cfg.Hold != nil {
		c.unhold = c.env.cfg.Hold(state, c.remote, c.cut)
	}
	return nil
}

func (g *goroutine) unpack(open func(*bufio.Reader) io.Reader, p compress.Packer) {
	g.unpacking = &unpackReader{g: g, source: g.client.in}
	plain := open(bufio.NewReaderSize(g.unpacking, unpackBuffer))
	g.client.in = g.client.in.Layer(unpacked{plain, g.client.env.unpackSlots})
	g.writeMu.Lock()
	g.packer = p
	g.writeMu.Unlock()
}

// remember gives Deflate a real compressor, which is worth its memory because the following output
// is messages.
func (g *goroutine) remember() {
	g.writeMu.Lock()
	defer g.writeMu.Unlock()
	if d, ok := g.packer.(*compress.Deflate); ok {
		d.Remember()
	}
}

// errEnded ends a decompressor's read when the session or the server ends the connection.
var errEnded = errors.New("connection is to end")

// unpacked is a decompressor's output. A read holds one of the slots, so that one processor stays
// free for the event loops. pace alone is not enough: input that decompresses to little or nothing
// is free of pace, and 2 MB/s of it may occupy a processor.
type unpacked struct {
	io.Reader
	slots chan struct{}
}

func (u unpacked) Read(b []byte) (int, error) {
	u.slots <- struct{}{}
	defer func() { <-u.slots }()
	return u.Reader.Read(b)
}

// unpackReader reads for a decompressor. A decompressor treats every read error as final, so
// unpackReader handles deadlines itself.
type unpackReader struct {
	g         *goroutine
	source    stream
	readBytes int // compressed bytes since the last pace.delay
	pace      pace
	err       error // the final error; nil while reading continues
}

func (p *unpackReader) Read(b []byte) (int, error) {
	slots := p.g.client.env.unpackSlots
	<-slots // a reader that waits does not need a processor
	defer func() { slots <- struct{}{} }()
	for {
		n, err := p.source.Read(b)
		p.readBytes += n
		if n > 0 {
			return n, nil // the next read returns the error again
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = p.g.idle()
			if err == nil && p.g.client.ended() {
				err = errEnded
			}
			if err == nil {
				err = p.g.setDeadline()
			}
		}
		if err != nil {
			p.err = err
			return 0, err
		}
	}
}

// closeNotify sends close_notify to a TLS peer. Requires: writeMu held, or no writer.
func (g *goroutine) closeNotify() {
	if g.tls != nil {
		// CloseWrite has its own timeout. An error means that the peer is gone.
		_ = g.tls.CloseWrite()
	}
}
