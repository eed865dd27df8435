package conn

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"time"
)

// IsPath reports whether address is the path of a Unix socket: it has a slash,
// which no host:port has. The name of a file here is ./name.
func IsPath(address string) bool { return strings.Contains(address, "/") }

// ListenAt listens at address with lc. At a path, a socket that a process left
// there which is gone is replaced; anything else there is an error. The socket
// is removed when the listener is closed.
func ListenAt(ctx context.Context, lc net.ListenConfig, address string) (net.Listener, error) {
	if !IsPath(address) {
		return lc.Listen(ctx, "tcp", address)
	}
	lc.Control = nil // for TCP
	ln, err := lc.Listen(ctx, "unix", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		if err := removeStale(ctx, address); err != nil {
			return nil, fmt.Errorf("listen unix %s: %w", address, err)
		}
		ln, err = lc.Listen(ctx, "unix", address)
	}
	return ln, err
}

// probeTime bounds the asking whether a process listens at a socket.
const probeTime = time.Second

// removeStale removes the socket at path if no process listens there.
func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // its owner was faster
		}
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return errors.New("there is a file of that name, and it is no socket")
	}
	d := net.Dialer{Timeout: probeTime}
	nc, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		nc.Close()
		return syscall.EADDRINUSE
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("ask whether it is in use: %w", err)
	}
	return os.Remove(path)
}

// Port returns the port of a listener's address, and -1 where it has none: for
// a Unix socket, and for nil.
func Port(a net.Addr) int {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.Port
	}
	return -1
}
