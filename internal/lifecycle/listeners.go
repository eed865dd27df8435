package lifecycle

import (
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"
)

// Listeners are sockets that outlive those who serve them one after the other: who connects in
// between waits, and is not refused. They are for one goroutine.
type Listeners map[string]*net.TCPListener // by flag

// Listen returns a listener at the address of a flag. Once it is closed, and no Accept is under
// way, the next Listen of that flag takes its socket over. A nil Listeners keeps nothing.
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

// lent is a listener whose socket stays open when it is closed.
type lent struct {
	*net.TCPListener
	closed atomic.Bool
}

// Accept implements net.Listener.
func (l *lent) Accept() (net.Conn, error) {
	conn, err := l.TCPListener.Accept()
	if err != nil && l.closed.Load() {
		err = net.ErrClosed // and not that of a deadline
	}
	return conn, err
}

// Close has Accept fail, also where it waits.
func (l *lent) Close() error {
	if l.closed.Swap(true) {
		return nil
	}
	return l.SetDeadline(time.Unix(1, 0))
}
