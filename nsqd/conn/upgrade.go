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

// A connection's wrappings, outermost first; each is there if it was
// negotiated. Arrival times find their way up by the offsets of each layer.
//
//	reading: socket - hook.Conn - TLS, hook.Layer - unpackReader, decompressor, hook.Layer - session
//	writing: session and writer - packer - TLS - socket

// stream is what a client's bytes are read from, at any level. Offsets count
// the bytes of that level.
type stream interface {
	Read(p []byte) (int, error)
	Offset() int64
	Arrival(start, end int64) stamp.Arrival
	Layer(io.Reader) *hook.Layer
	Ignore()
	Release()
}

// handshakeTimeout is how long a client may take over its TLS handshake.
const handshakeTimeout = 10 * time.Second

// unpackBuffer is how far a decompressor reads ahead; each compressed
// connection keeps so much.
const unpackBuffer = 2 << 10

// What one connection may have decompressed. A megabyte of "NOP" comes in one
// kilobyte, and its sender would have a processor for itself, and the
// event loops would wait for it. What unpackRatio explains is a publisher's, and
// costs its network like any other bytes.
const (
	unpackRatio = 8        // bytes for each that came
	unpackRate  = 8 << 20  // bytes a second beside those
	unpackBurst = 64 << 10 // of them at once, and the rest of a read
)

// pace spreads what a connection has decompressed. The zero value is ready.
type pace struct{ free mono.Time } // when all that was taken will have been paid

// take says how long to wait after out bytes were made of so many in.
func (p *pace) take(now mono.Time, out, in int) time.Duration {
	p.free = max(p.free, now.Add(-unpackBurst*time.Second/unpackRate))
	p.free = p.free.Add(time.Duration(out-unpackRatio*in) * time.Second / unpackRate)
	return max(0, p.free.Sub(now))
}

// upgrade wraps the stream as op says. Requires: the output is written, the
// buffer is empty.
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
	raw, ok := g.in.(*hook.Conn)
	if !ok {
		panic("conn: TLS is the first of the upgrades")
	}
	g.deadline = 0 // the next read sets its own
	if err := g.nc.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return fmt.Errorf("deadline: %w", err)
	}
	records := raw.Records()
	t := tls.Server(records, g.env.cfg.TLS)
	if err := g.shakeHands(t); err != nil {
		return err
	}
	g.in = records.Layer(t)
	g.through(t)
	return nil
}

// through has all that follows written through TLS.
func (g *goroutine) through(t *tls.Conn) {
	g.writeMu.Lock()
	defer g.writeMu.Unlock()
	g.tls, g.out = t, t
}

// shakeHands returns what the client is told if it can be told.
func (c *client) shakeHands(t *tls.Conn) error {
	if err := t.Handshake(); err != nil {
		var plain tls.RecordHeaderError
		if errors.As(err, &plain) && plain.Conn != nil {
			// A client that goes on in the clear can be told so.
			return wire.Wrap(wire.CodeIdentifyFailed, "IDENTIFY got TLS granted and no handshake came", err)
		}
		return err // the peer cannot read a frame now, so this is for the log
	}
	state := t.ConnectionState()
	c.stats.tls.Store(&state)
	return nil
}

func (g *goroutine) unpack(open func(*bufio.Reader) io.Reader, p compress.Packer) {
	g.unpacking = &unpackReader{g: g, under: g.in}
	plain := open(bufio.NewReaderSize(g.unpacking, unpackBuffer))
	g.in = g.in.Layer(unpacked{plain, g.env.unpacks})
	g.writeMu.Lock()
	g.packer = p
	g.writeMu.Unlock()
}

// remember makes the compression of what is sent worth its memory: from now on
// that is messages.
func (g *goroutine) remember() {
	g.writeMu.Lock()
	defer g.writeMu.Unlock()
	if d, ok := g.packer.(*compress.Deflate); ok {
		d.Remember()
	}
}

// errEnded ends a decompressor's read when the connection is to end. The reason
// is the session's or the server's.
var errEnded = errors.New("connection is to end")

// unpacked is a decompressor's output. While it is made it takes a processor, of which one is
// left to the event loops: what decompresses to nothing, or to little, is not paid for by
// pace, and 2 MB/s of it may keep a processor busy.
type unpacked struct {
	io.Reader
	turns chan struct{}
}

func (u unpacked) Read(b []byte) (int, error) {
	u.turns <- struct{}{}
	defer func() { <-u.turns }()
	return u.Reader.Read(b)
}

// unpackReader reads for a decompressor, to which an error of its source is final:
// it deals with deadlines itself, in the middle of the decompressor's Read.
type unpackReader struct {
	g     *goroutine
	under stream
	came  int // bytes since they were last paid for
	pace  pace
	err   error // that ended it, nil while it goes on
}

func (p *unpackReader) Read(b []byte) (int, error) {
	turns := p.g.env.unpacks
	<-turns // waiting takes no processor
	defer func() { turns <- struct{}{} }()
	for {
		n, err := p.under.Read(b)
		p.came += n
		if n > 0 {
			return n, nil // an error that came with it comes again
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = p.g.idle()
			if err == nil && p.g.ended() {
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

// goodbye tells a TLS peer that what it has read is all there is.
// Requires: writeMu held, or no writer.
func (g *goroutine) goodbye() {
	if g.tls != nil {
		// It bounds its own time. A peer that is gone needs no goodbye.
		_ = g.tls.CloseWrite()
	}
}
