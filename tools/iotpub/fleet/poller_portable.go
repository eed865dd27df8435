package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

// portable is the poller of systems without epoll: a goroutine for each
// connection reads, and Go's timers wait. It costs a goroutine switch for each
// answer and is late by up to a timer's granularity. It is compiled and tested
// everywhere.
type portable struct {
	// owned by the worker
	timer *time.Timer
	conns []*portableConn // by slot

	woken chan struct{} // holds one token: wait returns
	all   sync.WaitGroup

	mu struct {
		sync.Mutex
		ready []event
	}
}

type portableConn struct {
	slot   int32
	cancel context.CancelFunc

	mu struct {
		sync.Mutex
		conn   net.Conn // nil until connected
		err    error    // why there is none, or how reading ended
		buf    []byte   // read and not taken
		closed bool
	}
	// taken holds one token when buf has been taken.
	taken chan struct{}
}

// portableBuffer bounds what is read ahead for one connection.
const portableBuffer = 64 << 10

// portableWrite is how long a write may hold up the worker.
const portableWrite = time.Millisecond

func newPortable() *portable {
	p := &portable{timer: time.NewTimer(time.Hour), woken: make(chan struct{}, 1)}
	p.timer.Stop()
	return p
}

func (p *portable) post(e event) {
	p.mu.Lock()
	p.mu.ready = append(p.mu.ready, e)
	p.mu.Unlock()
	p.wake()
}

func (p *portable) dial(slot int32, address string) error {
	ctx, cancel := context.WithCancel(context.Background())
	c := &portableConn{slot: slot, cancel: cancel, taken: make(chan struct{}, 1)}
	for int(slot) >= len(p.conns) {
		p.conns = append(p.conns, nil)
	}
	p.conns[slot] = c
	p.all.Go(func() { p.run(ctx, c, address) })
	return nil
}

// run dials and then reads until the connection or the context ends.
func (p *portable) run(ctx context.Context, c *portableConn, address string) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", address)
	c.mu.Lock()
	if err == nil && c.mu.closed {
		c.mu.Unlock()
		_ = conn.Close() // nobody wants it any more
		return
	}
	c.mu.conn, c.mu.err = conn, err
	c.mu.Unlock()
	p.post(event{slot: c.slot, readable: err != nil, writable: true})
	if err != nil {
		return
	}
	chunk := make([]byte, 4096)
	for {
		n, err := conn.Read(chunk)
		c.mu.Lock()
		for len(c.mu.buf) > 0 && len(c.mu.buf)+n > portableBuffer && !c.mu.closed {
			c.mu.Unlock()
			select {
			case <-c.taken:
			case <-ctx.Done():
			}
			c.mu.Lock()
		}
		closed := c.mu.closed
		c.mu.buf = append(c.mu.buf, chunk[:n]...)
		c.mu.err = err
		c.mu.Unlock()
		if closed {
			return
		}
		p.post(event{slot: c.slot, readable: true})
		if err != nil {
			return
		}
	}
}

func (p *portable) connected(slot int32) error {
	c := p.conns[slot]
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.mu.conn != nil:
		return nil
	case c.mu.err != nil:
		return c.mu.err
	}
	return errAgain
}

func (p *portable) read(slot int32, b []byte) (int, error) {
	c := p.conns[slot]
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.mu.buf) == 0 {
		if c.mu.err != nil {
			return 0, c.mu.err
		}
		return 0, errAgain
	}
	n := copy(b, c.mu.buf)
	c.mu.buf = slices.Delete(c.mu.buf, 0, n)
	select {
	case c.taken <- struct{}{}:
	default:
	}
	return n, nil
}

func (p *portable) write(slot int32, b []byte) (int, error) {
	c := p.conns[slot]
	c.mu.Lock()
	conn := c.mu.conn
	c.mu.Unlock()
	if conn == nil {
		return 0, errAgain
	}
	if err := conn.SetWriteDeadline(time.Now().Add(portableWrite)); err != nil {
		return 0, fmt.Errorf("write: %w", err)
	}
	n, err := conn.Write(b)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// Nothing tells when there is room; try again at the next wait.
		p.post(event{slot: slot, writable: true})
		return n, errAgain
	}
	return n, err
}

func (p *portable) close(slot int32) {
	c := p.conns[slot]
	p.conns[slot] = nil
	c.cancel()
	c.mu.Lock()
	c.mu.closed = true
	conn := c.mu.conn
	c.mu.Unlock()
	if conn != nil {
		_ = conn.Close() // gone either way
	}
}

func (p *portable) wait(dst []event, until mono.Time) ([]event, error) {
	if d := until.Sub(clock.Mono()); d > 0 {
		p.timer.Reset(min(d, time.Hour))
		select {
		case <-p.woken:
		case <-p.timer.C:
		}
		p.timer.Stop()
	} else {
		select {
		case <-p.woken:
		default:
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.mu.ready {
		// An event of a connection that was closed since is dropped; one of its
		// successor in the slot comes for nothing, which is allowed.
		if int(e.slot) < len(p.conns) && p.conns[e.slot] != nil {
			dst = append(dst, e)
		}
	}
	p.mu.ready = p.mu.ready[:0]
	return dst, nil
}

func (p *portable) wake() {
	select {
	case p.woken <- struct{}{}:
	default:
	}
}

func (p *portable) shutdown() {
	for slot, c := range p.conns {
		if c != nil {
			p.close(int32(slot))
		}
	}
	p.all.Wait()
}
