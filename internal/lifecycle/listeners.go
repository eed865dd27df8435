package lifecycle

import (
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"
)

// Listeners are sockets that outlive their successive servers. New connections wait
// between two servers and are not refused. One goroutine uses Listeners.
type Listeners map[string]*net.TCPListener // by flag

// Listen returns a listener at a flag's address. After the listener is closed and no
// Accept is in progress, the next Listen of the flag reuses its socket. A nil Listeners
// keeps no sockets.
func (l Listeners) Listen(flag, address string) (net.Listener, error) {
	socket := l[flag]
	if socket == nil {
		ln, err := net.Listen("tcp", address)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		if l == nil {
			return ln, nil
		}
		socket = ln.(*net.TCPListener)
		l[flag] = socket
	}
	return &keptOpen{TCPListener: socket}, socket.SetDeadline(time.Time{})
}

// Close closes the sockets.
func (l Listeners) Close() error {
	var errs []error
	for _, socket := range l { // order: each by itself
		errs = append(errs, socket.Close())
	}
	return errors.Join(errs...)
}

// keptOpen is a listener whose socket stays open after Close.
type keptOpen struct {
	*net.TCPListener
	closed atomic.Bool
}

// Accept implements net.Listener.
func (l *keptOpen) Accept() (net.Conn, error) {
	conn, err := l.TCPListener.Accept()
	if err != nil && l.closed.Load() {
		err = net.ErrClosed // hides the deadline error
	}
	return conn, err
}

// Close makes Accept fail, including an Accept in progress.
func (l *keptOpen) Close() error {
	if l.closed.Swap(true) {
		return nil
	}
	return l.SetDeadline(time.Unix(1, 0))
}
