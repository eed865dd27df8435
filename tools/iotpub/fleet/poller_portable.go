package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

// portable is the poller for systems without epoll. A goroutine per connection dials and
// reads, and Go's timers wait. Each reply costs a goroutine switch, and events are late by
// up to the timer granularity. The poller is compiled and tested on every system.
type portable struct {
	// owned by the worker
	timer *time.Timer
	conns []*portableConn // by slot
	retry []int32         // slots with a full socket

	heard chan portableNews // unbuffered: a goroutine waits until the worker has received its news
	woken chan struct{}     // holds one token, which makes wait return
	all   sync.WaitGroup
}

// portableNews is a report of a connection's goroutine: connected, bytes read, or an error.
type portableNews struct {
	from *portableConn
	conn net.Conn
	data []byte
	err  error
}

// portableConn is a connection, owned by the worker.
type portableConn struct {
	slot   int32
	cancel context.CancelFunc
	conn   net.Conn // nil until connected
	data   []byte   // read from the socket but not from the poller
	err    error    // error of the dial, or of the last read
}

// portableWrite bounds the time that a write blocks the worker.
const portableWrite = time.Millisecond

func newPortable() *portable {
	p := &portable{timer: time.NewTimer(time.Hour), heard: make(chan portableNews), woken: make(chan struct{}, 1)}
	p.timer.Stop()
	return p
}

func (p *portable) dial(slot int32, address string) error {
	ctx, cancel := context.WithCancel(context.Background())
	c := &portableConn{slot: slot, cancel: cancel}
	for int(slot) >= len(p.conns) {
		p.conns = append(p.conns, nil)
	}
	p.conns[slot] = c
	p.all.Go(func() { p.run(ctx, c, address) })
	return nil
}

// run dials and then reads until the connection or the context ends.
func (p *portable) run(ctx context.Context, c *portableConn, address string) {
	say := func(n portableNews) bool {
		n.from = c
		select {
		case p.heard <- n:
			return true
		case <-ctx.Done():
			return false
		}
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		say(portableNews{err: err})
		return
	}
	defer conn.Close()                                      // best effort
	defer context.AfterFunc(ctx, func() { conn.Close() })() // ends Read
	if !say(portableNews{conn: conn}) {
		return
	}
	for err == nil {
		chunk := make([]byte, 4096)
		var n int
		n, err = conn.Read(chunk)
		if !say(portableNews{data: chunk[:n], err: err}) {
			return
		}
	}
}

func (p *portable) connected(slot int32) error {
	switch c := p.conns[slot]; {
	case c.conn != nil:
		return nil
	case c.err != nil:
		return c.err
	}
	return errAgain
}

func (p *portable) read(slot int32, b []byte) (int, error) {
	c := p.conns[slot]
	switch {
	case len(c.data) > 0:
		n := copy(b, c.data)
		c.data = c.data[n:]
		return n, nil
	case c.err != nil:
		return 0, c.err
	}
	return 0, errAgain
}

func (p *portable) write(slot int32, b []byte) (int, error) {
	conn := p.conns[slot].conn
	if conn == nil {
		return 0, errAgain
	}
	if err := conn.SetWriteDeadline(time.Now().Add(portableWrite)); err != nil {
		return 0, fmt.Errorf("write: %w", err)
	}
	n, err := conn.Write(b)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		p.retry = append(p.retry, slot) // no event reports room in the socket
		return n, errAgain
	}
	return n, err
}

func (p *portable) close(slot int32) {
	p.conns[slot].cancel()
	p.conns[slot] = nil
}

func (p *portable) wait(dst []event, until mono.Time) ([]event, error) {
	for _, slot := range p.retry {
		// a spurious event for a reused slot is allowed
		if p.conns[slot] != nil {
			dst = append(dst, event{slot: slot, writable: true})
		}
	}
	p.retry = p.retry[:0]
	d := until.Sub(clock.Mono())
	if len(dst) > 0 {
		d = 0
	}
	p.timer.Reset(max(0, min(d, time.Hour)))
	defer p.timer.Stop()
	select {
	case n := <-p.heard:
		dst = p.take(dst, n)
	case <-p.woken:
	case <-p.timer.C:
	}
	for len(dst) < maxEvents {
		select {
		case n := <-p.heard:
			dst = p.take(dst, n)
		default:
			return dst, nil
		}
	}
	return dst, nil
}

// take stores a connection's news, unless the connection has been closed.
func (p *portable) take(dst []event, n portableNews) []event {
	c := n.from
	if p.conns[c.slot] != c {
		return dst
	}
	if n.conn != nil {
		c.conn = n.conn
	}
	c.data, c.err = append(c.data, n.data...), n.err
	return append(dst, event{slot: c.slot, readable: n.conn == nil, writable: c.conn == nil || n.conn != nil})
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
