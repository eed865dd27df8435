package proxy

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// farewell is how long websockets have to end after their Close frames.
const farewell = time.Second

// goingAway is a server's Close frame with status 1001 (RFC 6455).
var goingAway = []byte{0x88, 2, 1001 >> 8, 1001 & 0xff}

// tunnel is the server's end of an upgraded connection. ReverseProxy lets one side end
// before the other, which may then be silent for limit: it may have no more to say, and
// no way to learn that its peer is gone.
type tunnel struct {
	io.ReadWriteCloser
	client net.Conn
	limit  time.Duration
	last   atomic.Pointer[time.Timer] // ends it, from when one side has ended

	// Of a websocket: what its server sends.
	websocket bool
	mu        struct {
		sync.Mutex
		frames  frames
		reading bool // all that was read has been written to the client
		leaving bool // a Close frame goes at the next boundary of two frames
		left    bool // it has gone: nothing of the server follows
	}
}

func (t *tunnel) Read(p []byte) (int, error) {
	if t.websocket {
		t.begin()
	}
	for {
		n, err := t.ReadWriteCloser.Read(p)
		t.moved(err != nil)
		if t.websocket {
			n = t.pass(p[:n])
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

// begin notes that the client has all that was read.
func (t *tunnel) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.reading = true
	t.leaveLocked()
}

// pass returns how much of what was read goes to the client.
func (t *tunnel) pass(p []byte) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.mu.left:
		return 0
	case t.mu.leaving:
		p = p[:t.mu.frames.rest(p)]
	default:
		t.mu.frames.skip(p)
	}
	t.mu.reading = len(p) == 0
	return len(p)
}

// leave tells the client of a websocket that the gateway goes: it answers with a Close frame
// of its own, which goes to the server, and both end the connection.
func (t *tunnel) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.leaving = true
	if t.mu.reading {
		t.leaveLocked()
	}
}

func (t *tunnel) leaveLocked() {
	if t.mu.leaving && !t.mu.left && t.mu.frames.between() {
		t.mu.left = true
		_ = t.client.SetWriteDeadline(time.Now().Add(farewell))
		_, _ = t.client.Write(goingAway) // or it has gone first
	}
}

func (t *tunnel) Write(p []byte) (int, error) {
	t.moved(false)
	return t.ReadWriteCloser.Write(p)
}

// CloseWrite tells the server that the client has ended.
func (t *tunnel) CloseWrite() error {
	t.moved(true)
	if half, ok := t.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

func (t *tunnel) moved(ended bool) {
	if last := t.last.Load(); last != nil {
		last.Reset(t.limit)
	} else if ended {
		t.last.Store(time.AfterFunc(t.limit, func() { _ = t.Close() }))
	}
}

// Close ends both sides: ReverseProxy closes only this one when the gateway ends, which
// a client that has yet to end would not notice.
func (t *tunnel) Close() error {
	return errors.Join(t.client.Close(), t.ReadWriteCloser.Close())
}

// tunnels are those that are open.
type tunnels struct {
	sync.WaitGroup
	mu struct {
		sync.Mutex
		websockets map[*tunnel]struct{}
		leaving    bool
	}
}

// add counts a websocket, to be told when the gateway goes.
func (t *tunnels) add(w *tunnel) {
	t.mu.Lock()
	if t.mu.websockets == nil {
		t.mu.websockets = map[*tunnel]struct{}{}
	}
	t.mu.websockets[w] = struct{}{}
	leaving := t.mu.leaving
	t.mu.Unlock()
	if leaving {
		w.leave()
	}
}

func (t *tunnels) remove(w *tunnel) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mu.websockets, w)
}

// leave has all websockets end, and waits for farewell at most.
func (t *tunnels) leave() {
	t.mu.Lock()
	t.mu.leaving = true
	var all []*tunnel
	for w := range t.mu.websockets {
		all = append(all, w)
	}
	t.mu.Unlock()
	if len(all) == 0 {
		return
	}
	var told sync.WaitGroup
	for _, w := range all { // order: each by itself
		told.Go(w.leave)
	}
	ended := make(chan struct{})
	go func() { // ends when the tunnels do, which Run waits for
		told.Wait()
		t.Wait()
		close(ended)
	}()
	late := time.NewTimer(farewell)
	defer late.Stop()
	select {
	case <-ended:
	case <-late.C:
	}
}

// frames finds where the frames of a websocket begin (RFC 6455, 5.2):
//
//	FIN, RSV, opcode | MASK, length | 0, 2 or 8 bytes of length | 0 or 4 bytes of mask | payload
type frames struct {
	header [14]byte
	have   int    // bytes of header
	left   uint64 // bytes of payload
}

// between reports whether the next byte begins a frame.
func (f *frames) between() bool { return f.have == 0 && f.left == 0 }

// skip takes bytes.
func (f *frames) skip(p []byte) {
	for len(p) > 0 {
		p = p[f.step(p):]
	}
}

// rest takes bytes up to the end of the frame that has begun, and returns how many.
func (f *frames) rest(p []byte) (n int) {
	for n < len(p) && !f.between() {
		n += f.step(p[n:])
	}
	return n
}

// step takes some bytes, at least one, and none of a second frame. Requires: p is not empty.
func (f *frames) step(p []byte) int {
	if f.left > 0 {
		n := min(uint64(len(p)), f.left)
		f.left -= n
		return int(n)
	}
	f.header[f.have] = p[0]
	f.have++
	if f.have < 2 {
		return 1
	}
	length, size := f.header[1]&0x7f, 2
	switch length {
	case 126:
		size += 2
	case 127:
		size += 8
	}
	if f.header[1]&0x80 != 0 {
		size += 4
	}
	if f.have < size {
		return 1
	}
	switch f.have = 0; length {
	case 126:
		f.left = uint64(binary.BigEndian.Uint16(f.header[2:]))
	case 127:
		f.left = binary.BigEndian.Uint64(f.header[2:])
	default:
		f.left = uint64(length)
	}
	return 1
}
