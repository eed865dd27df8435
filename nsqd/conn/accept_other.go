//go:build !linux

package conn

import (
	"net"
	"syscall"
)

// acceptor exists on Linux only.
type acceptor struct{}

func newAcceptor(net.Listener) (*acceptor, error) { return nil, nil }

func (*acceptor) accept() (int, string, error) { return -1, "", net.ErrClosed }
func (*acceptor) close()                       {}

func inherited(syscall.RawConn) error { return nil }
