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
	kept := l[flag]
	if kept == nil {
		ln, err := net.Listen("tcp", address)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		if l == nil {
			return ln, nil
		}
		kept = ln.(*net.TCPListener)
		l[flag] = kept
	}
	return &lent{TCPListener: kept}, kept.SetDeadline(time.Time{})
}

// Close closes the sockets.
func (l Listeners) Close() error {
	var errs []error
	for _, kept := range l { // order: each by itself
		errs = append(errs, kept.Close())
	}
	return errors.Join(errs...)
}

// lent is a listener whose socket stays open after Close.
type lent struct {
	*net.TCPListener
	closed atomic.Bool
}

// Accept implements net.Listener.
func (l *lent) Accept() (net.Conn, error) {
	conn, err := l.TCPListener.Accept()
	if err != nil && l.closed.Load() {
		err = net.ErrClosed // hides the deadline error
	}
	return conn, err
}

// Close makes Accept fail, including an Accept in progress.
func (l *lent) Close() error {
	if l.closed.Swap(true) {
		return nil
	}
	return l.SetDeadline(time.Unix(1, 0))
}
