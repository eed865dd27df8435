package testkit

import (
	"net"
	"sync"
)

// Piped is a listener without a network. Its connections, the far ends of net.Pipe, have
// no buffers. Make it with NewPiped.
type Piped struct {
	Conns chan net.Conn // returned by Accept
	done  chan struct{}
	close func()
}

// NewPiped returns an open listener.
func NewPiped() Piped {
	done := make(chan struct{})
	return Piped{make(chan net.Conn), done, sync.OnceFunc(func() { close(done) })}
}

// Accept implements net.Listener.
func (p Piped) Accept() (net.Conn, error) {
	select {
	case c := <-p.Conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (p Piped) Close() error { p.close(); return nil }

// Addr implements net.Listener.
func (p Piped) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }
