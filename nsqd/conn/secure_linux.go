package conn

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
)

// secure is the TLS of a connection on an event loop, and the net.Conn that it stands
// on: reads give what is there, and what it writes is gathered. A handshake, and a
// goroutine that takes the connection over, give it a net.Conn to wait on instead.
type secure struct {
	*hook.Records // its Conn is nil while the loop serves the connection
	tls           *tls.Conn

	// Owned as the slot is.
	out  []byte // for the socket
	more bool   // something may have been read that was not looked at: no event will tell
}

// Write implements net.Conn.
func (x *secure) Write(b []byte) (int, error) {
	if x.Conn != nil {
		return x.Conn.Write(b)
	}
	x.out = append(x.out, b...)
	return len(b), nil
}

// SetWriteDeadline implements net.Conn.
func (x *secure) SetWriteDeadline(t time.Time) error {
	if x.Conn != nil {
		return x.Conn.SetWriteDeadline(t)
	}
	return nil
}

// upgrade has TLS shake hands. Requires: the connection is away.
func (s *slot) upgrade(op session.Op) error {
	if op.Kind != session.OpTLS {
		return errLeaves
	}
	return s.withAnother(s.upgradeTLS)
}

func (s *slot) upgradeTLS() error {
	nc, err := s.second()
	if err != nil {
		return err
	}
	defer nc.Close()
	if err := nc.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return fmt.Errorf("deadline: %w", err)
	}
	owed := append(s.pending, s.sess.Output()...)
	s.sess.ClearOutput()
	s.pending = nil
	if _, err := nc.Write(owed); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	raw := s.in.(*hook.Conn) // TLS is the first of the upgrades
	raw.Move(nc)
	x := &secure{Records: raw.Records()}
	x.tls = tls.Server(x, s.env.cfg.TLS)
	err = s.interruptibly(func(ctx context.Context) error {
		// TLS itself would close x, and perhaps only when that has no net.Conn any more.
		defer context.AfterFunc(ctx, func() { nc.Close() })()
		return s.shakeHands(x.tls)
	})
	x.MoveToSocket(hook.Socket{FD: s.fd})
	if err == nil {
		x.more = x.Buffered() > 0
		s.in, s.secure = x.Layer(x.tls), x
	}
	return err
}

// second returns another descriptor of the socket, in Go's poller.
func (s *slot) second() (net.Conn, error) {
	s.closing.Lock()
	defer s.closing.Unlock()
	if s.lost {
		return nil, net.ErrClosed
	}
	fd, err := unix.FcntlInt(uintptr(s.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return polled(fd, s.remote)
}

// polled gives a descriptor, which it takes over, to Go's poller.
func polled(fd int, remote string) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), remote)
	defer f.Close()
	return net.FileConn(f)
}

// unread reports whether something may be there to be read of which no event tells,
// and may be read now.
func (s *slot) unread() bool {
	return s.phase == open && !s.away && s.secure != nil && s.secure.more && len(s.pending) < repliesOwed
}

// unsent reports whether TLS has something to be written.
func (s *slot) unsent() bool { return s.secure != nil && len(s.secure.out) > 0 }

// read reads what there is of the stream, and notes whether there may be more. It took so many
// bytes of the socket: those that TLS makes little of are as much work.
func (s *slot) read() (took int, err error) {
	x, space := s.secure, s.buf[s.w:]
	if x == nil {
		took, err = s.in.Read(space)
		s.w += took
		return took, err
	}
	from := x.Offset()
	n, err := s.in.Read(space)
	s.w += n
	x.more = !errors.Is(err, hook.ErrAgain) && (n == len(space) || x.Buffered() > 0)
	return int(x.Offset() - from), err
}

// seal returns what is to be written to the socket for b, until the next call.
func (l *loop) seal(s *slot, b []byte) ([]byte, error) {
	x := s.secure
	if x == nil {
		return b, nil
	}
	x.out = append(l.sealed[:0], x.out...)
	var err error
	if len(b) > 0 {
		_, err = x.tls.Write(b)
	}
	out := x.out
	x.out, l.sealed = nil, out
	if cap(l.sealed) > 2*loopGather {
		l.sealed = nil
	}
	return out, err
}
