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

// secure is the TLS of a connection on an event loop, and the net.Conn below TLS. Reads return the
// available bytes. Writes collect in out. During a handshake, and after a move to a goroutine,
// secure uses a blocking net.Conn instead.
type secure struct {
	*hook.Records // its Conn is nil while the loop serves the connection
	tls           *tls.Conn

	// Owned as the slot is.
	out      []byte // for the socket
	buffered bool   // unread bytes may be buffered, for which no event will come
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

// upgrade performs the TLS handshake: admits moves a connection with another upgrade to a
// goroutine. Requires: s.offloaded.
func (s *slot) upgrade(session.Op) error { return s.client.withExtraDescriptor(s.upgradeTLS) }

func (s *slot) upgradeTLS() error {
	nc, err := s.duplicateConn()
	if err != nil {
		return err
	}
	defer nc.Close()
	if err := nc.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return fmt.Errorf("deadline: %w", err)
	}
	output := append(s.pending, s.client.sess.Output()...)
	s.client.sess.ClearOutput()
	s.pending = nil
	if _, err := nc.Write(output); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	raw := s.client.in.(*hook.Conn) // TLS is the first upgrade
	raw.Move(nc)
	x := &secure{Records: raw.Records()}
	x.tls = tls.Server(x, s.client.env.cfg.TLS)
	err = s.client.interruptibly(func(ctx context.Context) error {
		// On cancellation TLS would close x, perhaps only after x has lost its net.Conn.
		defer context.AfterFunc(ctx, func() { nc.Close() })()
		return handshake(s.client, x.tls)
	})
	x.MoveToSocket(hook.Socket{FD: s.fd})
	if err == nil {
		x.buffered = x.Buffered() > 0
		s.client.in, s.secure = x.Layer(x.tls), x
	}
	return err
}

// duplicateConn duplicates the socket's descriptor and registers the duplicate with Go's poller.
func (s *slot) duplicateConn() (net.Conn, error) {
	s.fdMu.Lock()
	defer s.fdMu.Unlock()
	if s.fdClosed {
		return nil, net.ErrClosed
	}
	fd, err := unix.FcntlInt(uintptr(s.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return netConn(fd, s.client.remote)
}

// netConn registers a descriptor with Go's poller, and takes ownership of fd.
func netConn(fd int, remote string) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), remote)
	defer f.Close()
	return net.FileConn(f)
}

// readTLS is read with TLS, and records whether more may be buffered. TLS records cost work even if they
// contain little data.
func (s *slot) readTLS() (socketBytes int, err error) {
	sec, space := s.secure, s.client.buf[s.client.w:]
	from := sec.Offset()
	n, err := s.client.in.Read(space)
	s.client.w += n
	sec.buffered = !errors.Is(err, hook.ErrAgain) && (n == len(space) || sec.Buffered() > 0)
	return int(sec.Offset() - from), err
}

// sealTLS is seal with TLS.
func (l *loop) sealTLS(s *slot, b []byte) ([]byte, error) {
	sec := s.secure
	sec.out = append(l.sealed[:0], sec.out...)
	var err error
	if len(b) > 0 {
		_, err = sec.tls.Write(b)
	}
	out := sec.out
	sec.out, l.sealed = nil, out
	if cap(l.sealed) > 2*loopGather {
		l.sealed = nil
	}
	return out, err
}
