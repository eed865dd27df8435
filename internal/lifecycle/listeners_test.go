package lifecycle

import (
	"errors"
	"net"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A client that connects while no process serves the socket is accepted by the next process that
// serves it.
func TestListenersAreKept(t *testing.T) {
	sockets := Listeners{}
	first, err := sockets.Listen("--address", "127.0.0.1:0")
	testkit.Must(t, err)
	address := first.Addr().String()
	ended := make(chan error)
	go func() {
		for {
			c, err := first.Accept()
			if err != nil {
				ended <- err
				return
			}
			_ = c.Close()
		}
	}()
	testkit.Must(t, first.Close())
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	between, err := net.Dial("tcp", address)
	testkit.Must(t, err)
	defer between.Close()
	second, err := sockets.Listen("--address", "127.0.0.1:0")
	testkit.Must(t, err)
	testkit.Must(t, first.Close()) // closing the first listener does not affect the second
	if at := second.Addr().String(); at != address {
		t.Errorf("at %s, not %s", at, address)
	}
	conn, err := second.Accept()
	testkit.Must(t, err)
	testkit.Must(t, conn.Close())
	if _, err := sockets.Listen("--other", address); err == nil {
		t.Error("two flags have one socket")
	}
	testkit.Must(t, second.Close())
	testkit.Must(t, sockets.Close())
	if c, err := net.Dial("tcp", address); err == nil {
		c.Close()
		t.Error("it is open at the end")
	}
	plain, err := Listeners(nil).Listen("--address", address)
	testkit.Must(t, err)
	testkit.Must(t, plain.Close())
}
