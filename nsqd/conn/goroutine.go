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

// goroutine drives one connection: one reads, and for a subscriber a second one
// writes (writer).
type goroutine struct {
	// Set once.
	*client
	nc net.Conn

	// Owned by the reader.
	unpacking *unpackReader // nil without compression
	deadline  mono.Time     // of reads, as set on nc; 0: to be set

	// writeMu orders the writes of the reader (replies) and of the writer
	// (messages); held during a write, which WriteTimeout bounds. It guards
	// what they write through.
	writeMu sync.Mutex
	out     io.Writer       // nc, or TLS over it
	tls     *tls.Conn       // nil without TLS
	packer  compress.Packer // nil without compression
	packed  []byte          // scratch for it

	wake    chan struct{} // 1 deep: deliveries are there for the writer, or the end
	writers sync.WaitGroup
}

// Bounds of what a client may still send at its end.
const (
	lingerTime  = time.Second
	lingerBytes = 1 << 20 // if it was refused
)

// newGoroutine becomes the client's driver.
func newGoroutine(c *client, nc net.Conn) *goroutine {
	g := &goroutine{client: c, nc: nc, out: nc, wake: make(chan struct{}, 1)}
	c.setDriver(g)
	return g
}

func (g *goroutine) nonblocking() bool                      { return false }
func (g *goroutine) admits(*session.Op, mono.Time) error    { return nil }
func (g *goroutine) arrival(start, end int64) stamp.Arrival { return g.in.Arrival(start, end) }

// interrupt wakes a reader that waits for bytes by a deadline in the past.
func (g *goroutine) interrupt() { _ = g.nc.SetReadDeadline(time.Unix(1, 0)) }

func (g *goroutine) cut() { g.nc.Close() }

// notify wakes the writer: one wake-up covers all.
func (g *goroutine) notify() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// subscribed starts the writer: the reply to SUB goes out before the first
// message can.
func (g *goroutine) subscribed() error {
	g.in.Ignore()
	g.remember()
	if err := g.reply(); err != nil {
		return err
	}
	g.writers.Go(g.newWriter().run)
	return nil
}

func (g *goroutine) reply() error {
	out := g.sess.Output()
	if len(out) == 0 {
		return nil
	}
	err := g.write(out)
	g.sess.ClearOutput()
	return err
}

// run reads until the connection ends. It owns everything the connection has.
func (g *goroutine) run() {
	g.in = g.env.stamps.Track(g.nc)
	g.end(g.read())
}

// goOn is run for a connection that comes from a loop, which owed the peer some
// bytes and could not carry out t. What follows is said through secure, unless it is nil.
func (g *goroutine) goOn(owed []byte, secure *tls.Conn, t *task) error {
	if len(owed) > 0 {
		if err := g.write(owed); err != nil {
			return err
		}
	}
	if secure != nil {
		g.through(secure)
	}
	if err := g.carryOut(t, clock.Mono()); err != nil {
		return err
	}
	return g.read()
}

// end gives back all that the connection has.
func (g *goroutine) end(err error) {
	g.release()
	g.notify() // the writer ends with the subscription
	g.writers.Wait()
	g.giveBack()
	g.logEnd(err)
	g.goodbye()
	if g.ended() {
		g.linger()
	}
	g.in.Release()
	g.logEnd(ignoreClosed(g.nc.Close()))
}

// linger lets the peer read the last replies: closing a socket with unread
// input resets the connection, and the reset overtakes what was sent. A
// publisher that pipelines would take what was accepted as refused.
func (g *goroutine) linger() {
	half, ok := g.nc.(interface{ CloseWrite() error }) // TCP, Unix sockets
	if !ok || half.CloseWrite() != nil {
		return
	}
	left := int64(math.MaxInt64)
	if closing, _ := g.sess.Closing(); closing {
		left = lingerBytes
	}
	now := clock.Mono()
	for until := time.Now().Add(g.lingerUntil(now).Sub(now)); left > 0 && time.Now().Before(until); {
		if g.nc.SetReadDeadline(until) != nil {
			return
		}
		n, err := io.CopyN(io.Discard, g.nc, left)
		if !errors.Is(err, os.ErrDeadlineExceeded) { // else it may be an interrupt's
			return
		}
		left -= n
	}
}

// read is the reader's loop; nil means an orderly end.
func (g *goroutine) read() error {
	var t task
	for {
		if err := g.consume(&t); err != nil {
			return err
		}
		if g.ended() {
			cause := g.cause()
			if err := g.reply(); err != nil {
				return err
			}
			return cause
		}
		if err := g.setDeadline(); err != nil {
			return err
		}
		if !g.makeRoom() {
			continue
		}
		n, err := g.in.Read(g.buf[g.w:])
		g.w += n
		if p := g.unpacking; p != nil {
			// Less than what a read has at 8 MB/s: it need not be ended.
			time.Sleep(p.pace.take(clock.Mono(), n, p.came))
			p.came = 0
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

// readFault tells a failure of the network from damage in what was sent.
func (g *goroutine) readFault(err error) error {
	switch {
	case g.unpacking == nil:
		return fmt.Errorf("read: %w", err)
	case g.unpacking.err == nil:
		return wire.Wrap(wire.CodeInvalid, "the compressed stream is damaged", err)
	case errors.Is(g.unpacking.err, io.EOF), errors.Is(g.unpacking.err, net.ErrClosed):
		return nil // some decompressors call it damage
	}
	return fmt.Errorf("read: %w", g.unpacking.err)
}

// idle does what is due when a read's deadline has passed.
func (g *goroutine) idle() error {
	g.sess.Tick(clock.Mono())
	g.deadline = 0
	return g.reply()
}

// setDeadline makes the next read end when the session wants a Tick.
func (g *goroutine) setDeadline() error {
	d := g.sess.Deadline()
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
	if g.ended() { // stop or quit came between: their deadline must not be lost
		g.interrupt()
	}
	return nil
}

// write writes all of b.
func (g *goroutine) write(b []byte) error {
	g.writeMu.Lock()
	defer g.writeMu.Unlock()
	if err := g.nc.SetWriteDeadline(time.Now().Add(g.env.cfg.WriteTimeout)); err != nil {
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
