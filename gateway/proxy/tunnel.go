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

// farewell is the time for websockets to end after their Close frames.
const farewell = time.Second

// goingAway is a server's Close frame with status 1001 (RFC 6455).
var goingAway = []byte{0x88, 2, 1001 >> 8, 1001 & 0xff}

// tunnel is the server's end of an upgraded connection. ReverseProxy lets one side end before the
// other. Then the tunnel closes once the other side is silent for limit. The silent side may have
// nothing more to send, and then it cannot notice that its peer has ended.
type tunnel struct {
	io.ReadWriteCloser
	client    net.Conn
	limit     time.Duration
	idleTimer atomic.Pointer[time.Timer] // closes the tunnel; set when one side ends

	// For a websocket: the frames from the server.
	websocket bool
	mu        struct {
		sync.Mutex
		frames  frames
		reading bool // the client has received everything that was read
		leaving bool // send a Close frame at the next boundary of frames
		closing bool // the Close frame is sent: drop further data of the server
	}
}

func (t *tunnel) Read(p []byte) (int, error) {
	if t.websocket {
		t.begin()
	}
	for {
		n, err := t.ReadWriteCloser.Read(p)
		t.recordTraffic(err != nil)
		if t.websocket {
			n = t.pass(p[:n])
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

// begin records that the client has received everything that was read.
func (t *tunnel) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.reading = true
	t.leaveLocked()
}

// pass returns how many of the bytes read go to the client.
func (t *tunnel) pass(p []byte) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.mu.closing:
		return 0
	case t.mu.leaving:
		p = p[:t.mu.frames.payload(p)]
	default:
		t.mu.frames.skip(p)
	}
	t.mu.reading = len(p) == 0
	return len(p)
}

// leave sends a Close frame to the client of a websocket: the gateway shuts down. The client answers with its own
// Close frame, which goes to the server, and both end the connection.
func (t *tunnel) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.leaving = true
	if t.mu.reading {
		t.leaveLocked()
	}
}

func (t *tunnel) leaveLocked() {
	if t.mu.leaving && !t.mu.closing && t.mu.frames.atBoundary() {
		t.mu.closing = true
		_ = t.client.SetWriteDeadline(time.Now().Add(farewell))
		_, _ = t.client.Write(goingAway) // fails if the client is already gone
	}
}

func (t *tunnel) Write(p []byte) (int, error) {
	t.recordTraffic(false)
	return t.ReadWriteCloser.Write(p)
}

// CloseWrite half-closes the connection to the server: the client has ended.
func (t *tunnel) CloseWrite() error {
	t.recordTraffic(true)
	if half, ok := t.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

func (t *tunnel) recordTraffic(atEnd bool) {
	if last := t.idleTimer.Load(); last != nil {
		last.Reset(t.limit)
	} else if atEnd {
		t.idleTimer.Store(time.AfterFunc(t.limit, func() { _ = t.Close() }))
	}
}

// Close closes both sides. When the gateway ends, ReverseProxy closes only the server's side. An open
// client connection would stay.
func (t *tunnel) Close() error {
	return errors.Join(t.client.Close(), t.ReadWriteCloser.Close())
}

type tunnels struct {
	sync.WaitGroup
	mu struct {
		sync.Mutex
		websockets map[*tunnel]struct{}
		leaving    bool
	}
}

// add registers a websocket, so that leave can end it.
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

// leave ends all websockets, and waits at most farewell.
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
	var notified sync.WaitGroup
	for _, w := range all { // order: each by itself
		notified.Go(w.leave)
	}
	done := make(chan struct{})
	go func() { // ends with the tunnels, for which Run waits
		notified.Wait()
		t.Wait()
		close(done)
	}()
	timeout := time.NewTimer(farewell)
	defer timeout.Stop()
	select {
	case <-done:
	case <-timeout.C:
	}
}

// frames finds the boundaries of a websocket's frames (RFC 6455, 5.2):
//
//	FIN, RSV, opcode | MASK, length | 0, 2 or 8 bytes of length | 0 or 4 bytes of mask | payload
type frames struct {
	header      [14]byte
	headerLen   int    // bytes of header
	payloadLeft uint64 // bytes of payload
}

// atBoundary reports whether the next byte begins a frame.
func (f *frames) atBoundary() bool { return f.headerLen == 0 && f.payloadLeft == 0 }

// skip consumes p.
func (f *frames) skip(p []byte) {
	for len(p) > 0 {
		p = p[f.step(p):]
	}
}

// payload consumes bytes up to the end of the current frame, and returns their number.
func (f *frames) payload(p []byte) (n int) {
	for n < len(p) && !f.atBoundary() {
		n += f.step(p[n:])
	}
	return n
}

// step consumes at least one byte, within one frame, and returns the number of bytes.
// Requires: p is not empty.
func (f *frames) step(p []byte) int {
	if f.payloadLeft > 0 {
		n := min(uint64(len(p)), f.payloadLeft)
		f.payloadLeft -= n
		return int(n)
	}
	f.header[f.headerLen] = p[0]
	f.headerLen++
	if f.headerLen < 2 {
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
	if f.headerLen < size {
		return 1
	}
	switch f.headerLen = 0; length {
	case 126:
		f.payloadLeft = uint64(binary.BigEndian.Uint16(f.header[2:]))
	case 127:
		f.payloadLeft = binary.BigEndian.Uint64(f.header[2:])
	default:
		f.payloadLeft = uint64(length)
	}
	return 1
}
