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

// IsPath reports whether address is the path of a Unix socket: a path has a slash, and no host:port
// has. Write ./name for a file in the working directory.
func IsPath(address string) bool { return strings.Contains(address, "/") }

// ListenAt listens at address with lc. At a path, ListenAt replaces the socket of a process that
// has exited. Any other file there is an error. Closing the listener removes the socket.
func ListenAt(ctx context.Context, lc net.ListenConfig, address string) (net.Listener, error) {
	if !IsPath(address) {
		return lc.Listen(ctx, "tcp", address)
	}
	lc.Control = nil // Control is for TCP
	ln, err := lc.Listen(ctx, "unix", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		if err := removeStale(ctx, address); err != nil {
			return nil, fmt.Errorf("listen unix %s: %w", address, err)
		}
		ln, err = lc.Listen(ctx, "unix", address)
	}
	return ln, err
}

// probeTime bounds the attempt to connect to an existing socket.
const probeTime = time.Second

// removeStale removes the socket at path if no process listens there.
func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // its owner removed it first
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
		return fmt.Errorf("check whether it is in use: %w", err)
	}
	return os.Remove(path)
}

// Port returns the port of a listener's address, or -1 for a Unix socket and for nil.
func Port(a net.Addr) int {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.Port
	}
	return -1
}
