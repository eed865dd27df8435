package conn_test

import (
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Clients may connect before the broker accepts, so the listener sets the options. Without TCP_NODELAY, each of several
// replies in a row would wait 40 ms for the peer's delayed acknowledgement of the reply before.
func TestConnectionsAreReadyBeforeAnybodyAccepts(t *testing.T) {
	n := benchNode(t, 1, false)
	defer n.close()
	ln := testkit.Result(n.srv.Listen(t.Context(), "127.0.0.1:0")).Must(t)
	defer ln.Close()
	client := testkit.Result(net.Dial("tcp", ln.Addr().String())).Must(t)
	defer client.Close()
	f, err := ln.(*net.TCPListener).File() // Accept of package net would set the options
	testkit.Must(t, err)
	defer f.Close()
	testkit.Must(t, unix.SetNonblock(int(f.Fd()), false))
	fd, _, err := unix.Accept4(int(f.Fd()), unix.SOCK_CLOEXEC)
	if err != nil {
		t.Fatal(os.NewSyscallError("accept", err))
	}
	defer unix.Close(fd)
	for name, o := range map[string]struct{ level, name int }{
		"TCP_NODELAY": {unix.IPPROTO_TCP, unix.TCP_NODELAY}, "SO_KEEPALIVE": {unix.SOL_SOCKET, unix.SO_KEEPALIVE},
	} {
		if on, err := unix.GetsockoptInt(fd, o.level, o.name); err != nil || on == 0 {
			t.Errorf("%s: %d, %v", name, on, err)
		}
	}
}
