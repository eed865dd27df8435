package conn

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/compress"
)

// goroutine drives one connection: one goroutine reads, and for a subscriber a second goroutine
// writes (writer).
type goroutine struct {
	// Set once.
	client *client
	nc     net.Conn

	// Owned by the reader.
	unpacking *unpackReader // nil without compression
	deadline  mono.Time     // read deadline of nc; 0: not set

	// writeMu orders the writes of the reader (replies) and of the writer (messages). It is held
	// during a write, which WriteTimeout bounds. It guards the fields below.
	writeMu sync.Mutex
	out     io.Writer       // nc, or TLS over nc
	tls     *tls.Conn       // nil without TLS
	packer  compress.Packer // nil without compression
	packed  []byte          // scratch for packer

	wake    chan struct{} // capacity 1: messages for the writer, or the end
	writers sync.WaitGroup
}

// Limits for a client that still sends after the end of its session.
const (
	lingerTime  = time.Second
	lingerBytes = 1 << 20 // for a client that was refused
)

// newGoroutine creates a driver and sets it as the client's driver.
func newGoroutine(c *client, nc net.Conn) *goroutine {
	g := &goroutine{client: c, nc: nc, out: nc, wake: make(chan struct{}, 1)}
	c.setDriver(g, g)
	return g
}

func (g *goroutine) nonblocking() bool                      { return false }
func (g *goroutine) admits(*session.Op, mono.Time) verdict  { return carriedOut }
func (g *goroutine) arrival(start, end int64) stamp.Arrival { return g.client.in.Arrival(start, end) }

// interrupt wakes a reader that waits for bytes, with a deadline in the past.
func (g *goroutine) interrupt() { _ = g.nc.SetReadDeadline(time.Unix(1, 0)) }

func (g *goroutine) cut() { g.nc.Close() }

// notify wakes the writer. One wake-up is enough for all messages.
func (g *goroutine) notify() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// subscribed writes the reply to SUB, then starts the writer, so that the reply precedes the first
// message.
func (g *goroutine) subscribed() error {
	if g.client.mqtt == nil {
		g.client.in.Ignore()
	}
	g.remember()
	if err := g.reply(); err != nil {
		return err
	}
	g.writers.Go(g.newWriter().run)
	return nil
}

func (g *goroutine) reply() error {
	out := g.client.sess.Output()
	if len(out) == 0 {
		return nil
	}
	err := g.write(out)
	g.client.sess.ClearOutput()
	return err
}

// run reads until the connection ends. It owns all of the connection's resources.
func (g *goroutine) run() {
	g.client.in = g.client.env.stamps.Track(g.nc)
	g.end(g.read())
}

// resume continues a connection of a loop: it writes output, which the loop did not write, then
// carries out t, which the loop could not. If secure is not nil, all later output goes through TLS.
func (g *goroutine) resume(output []byte, secure *tls.Conn, t *task) error {
	if len(output) > 0 {
		if err := g.write(output); err != nil {
			return err
		}
	}
	if secure != nil {
		g.sendThroughTLS(secure)
	}
	if _, err := g.client.carryOut(t, clock.Mono()); err != nil {
		return err
	}
	return g.read()
}

// end releases all of the connection's resources.
func (g *goroutine) end(err error) {
	g.client.release()
	g.notify() // the writer ends with the subscription
	g.writers.Wait()
	g.client.releaseBuffer()
	g.client.logEnd(err)
	g.closeNotify()
	if g.client.ended() {
		g.linger()
	}
	g.client.in.Release()
	g.client.logEnd(ignoreClosed(g.nc.Close()))
}

// linger lets the peer read the last replies. If a socket with unread input is closed, TCP resets
// the connection, and the peer may lose replies. A pipelining publisher would then treat accepted
// messages as refused.
func (g *goroutine) linger() {
	half, ok := g.nc.(interface{ CloseWrite() error }) // TCP and Unix sockets
	if !ok || half.CloseWrite() != nil {
		return
	}
	left := int64(math.MaxInt64)
	if closing, _ := g.client.sess.Closing(); closing {
		left = lingerBytes
	}
	now := clock.Mono()
	for until := time.Now().Add(g.client.lingerUntil(now).Sub(now)); left > 0 && time.Now().Before(until); {
		if g.nc.SetReadDeadline(until) != nil {
			return
		}
		n, err := io.CopyN(io.Discard, g.nc, left)
		if !errors.Is(err, os.ErrDeadlineExceeded) { // the deadline may come from interrupt
			return
		}
		left -= n
	}
}

// read is the reader's loop. It returns nil at an orderly end.
func (g *goroutine) read() error {
	var t task
	for {
		if _, err := g.client.consume(&t); err != nil {
			return err
		}
		if g.client.ended() {
			cause := g.client.cause()
			if err := g.reply(); err != nil {
				return err
			}
			return cause
		}
		if g.client.paused {
			continue
		}
		if err := g.setDeadline(); err != nil {
			return err
		}
		if !g.client.makeRoom() {
			continue
		}
		n, err := g.client.in.Read(g.client.buf[g.client.w:])
		g.client.w += n
		if p := g.unpacking; p != nil {
			// The sleep needs no interruption: it is shorter than one read takes at 8 MB/s.
			time.Sleep(p.pace.delay(clock.Mono(), n, p.readBytes))
			p.readBytes = 0
		}
		switch {
		case err == nil, errors.Is(err, errEnded):
		case errors.Is(err, os.ErrDeadlineExceeded):
			if err := g.idle(); err != nil {
				return err
			}
		case isEnd(err):
			return nil
		default:
			return g.readFault(err)
		}
	}
}

// readFault distinguishes network failures from damaged data.
func (g *goroutine) readFault(err error) error {
	switch {
	case g.unpacking == nil:
		return fmt.Errorf("read: %w", err)
	case g.unpacking.err == nil:
		return wire.Wrap(wire.CodeInvalid, "the compressed stream is damaged", err)
	case errors.Is(g.unpacking.err, io.EOF), errors.Is(g.unpacking.err, net.ErrClosed):
		return nil // some decompressors report the end of input as damage
	}
	return fmt.Errorf("read: %w", g.unpacking.err)
}

// idle handles a read deadline that has passed.
func (g *goroutine) idle() error {
	g.client.sess.Tick(clock.Mono())
	g.deadline = 0
	return g.reply()
}

// setDeadline makes the next read end when the session needs a Tick.
func (g *goroutine) setDeadline() error {
	d := g.client.sess.Deadline()
	if d == g.deadline {
		return nil
	}
	g.deadline = d
	t := time.Time{}
	if d != mono.Never {
		t = time.Now().Add(d.Sub(clock.Mono()))
	}
	if err := g.nc.SetReadDeadline(t); err != nil {
		return fmt.Errorf("read deadline: %w", err)
	}
	if g.client.ended() { // stop or quit came meanwhile; keep their deadline
		g.interrupt()
	}
	return nil
}

func (g *goroutine) write(b []byte) error {
	g.writeMu.Lock()
	defer g.writeMu.Unlock()
	if err := g.nc.SetWriteDeadline(time.Now().Add(g.client.env.cfg.WriteTimeout)); err != nil {
		return fmt.Errorf("write deadline: %w", err)
	}
	if g.packer != nil {
		g.packed = g.packer.Append(g.packed[:0], b)
		b = g.packed
		if cap(b) > keepOut {
			g.packed = nil
		}
	}
	if _, err := g.out.Write(b); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}
