package hook

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// acceptRaw accepts a connection that only the test watches.
func acceptRaw(t *testing.T, ln net.Listener) Socket {
	t.Helper()
	file := testkit.Result(ln.(*net.TCPListener).File()).Must(t)
	defer file.Close()
	raw, err := file.SyscallConn()
	testkit.Must(t, err)
	fd := -1
	err = raw.Read(func(at uintptr) bool {
		var inner error
		fd, _, inner = unix.Accept4(int(at), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		return !errors.Is(inner, unix.EAGAIN)
	})
	if err != nil || fd < 0 {
		t.Fatal(fd, err)
	}
	return Socket{FD: fd}
}

// socketSources runs a test with every source that works on this machine.
func socketSources(t *testing.T, test func(*testing.T, *Stamper, stamp.Source)) {
	t.Run("read", func(t *testing.T) { test(t, stamper(t, nil, nil), stamp.Read) })
	t.Run("sotimestamp", func(t *testing.T) {
		src, err := openTimestamping(Config{})
		test(t, stamper(t, src, err), stamp.UpperBound)
	})
	t.Run("ebpf", func(t *testing.T) {
		s, _ := loaded(t, false, Config{})
		test(t, s, stamp.Exact)
	})
}

func TestASocketIsStampedWithoutWaitingAndMovesOn(t *testing.T) {
	socketSources(t, func(t *testing.T, s *Stamper, want stamp.Source) {
		ln := listen(t, s, "tcp", "127.0.0.1:0")
		client := dial(t, ln, net.Dialer{})
		x := acceptRaw(t, ln)
		c := s.TrackSocket(x)
		defer c.Release()
		buf := make([]byte, 200)
		if n, err := c.Read(buf); n != 0 || !errors.Is(err, ErrAgain) {
			t.Fatalf("an empty socket: %d, %v", n, err)
		}
		testkit.Result(c.Read(nil)).MustEqual(t, 0, "no room")
		check := func(what string) {
			t.Helper()
			span := client.send(message(100))
			start := c.Offset()
			testkit.Result(c.Read(buf)).MustEqual(t, 100, "%s", what)
			if a := c.Arrival(start, c.Offset()); want == stamp.Read {
				if a.Source != want || a.At.Before(span.from) {
					t.Errorf("%s: %+v", what, a)
				}
			} else {
				within(t, what, a, want, span)
			}
		}
		check("as a socket")
		check("as a socket again")

		f := os.NewFile(uintptr(x.FD), "") // f owns the descriptor from now on
		nc, err := net.FileConn(f)
		testkit.Must(t, err)
		defer nc.Close()
		testkit.Must(t, f.Close())
		c.Move(nc)
		check("moved")
		testkit.Equal(t, c.Offset(), 300, "offset after 300 bytes")
		testkit.Must(t, client.Close())
		if n, err := c.Read(buf); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("the end: %d, %v", n, err)
		}
	})
}

func TestASocketSaysHowItEnds(t *testing.T) {
	socketSources(t, func(t *testing.T, s *Stamper, _ stamp.Source) {
		ln := listen(t, s, "tcp", "127.0.0.1:0")
		end := func(how func(*sender)) error {
			client := dial(t, ln, net.Dialer{})
			x := acceptRaw(t, ln)
			defer unix.Close(x.FD)
			c := s.TrackSocket(x)
			defer c.Release()
			how(client)
			testkit.Must(t, client.Close())
			for {
				if _, err := c.Read(make([]byte, 10)); !errors.Is(err, ErrAgain) {
					return err
				}
			}
		}
		testkit.ErrorIs(t, end(func(*sender) {}), io.EOF, "closed")
		err := end(func(c *sender) {
			testkit.Must(t, c.SetLinger(0))
		})
		testkit.ErrorIs(t, err, unix.ECONNRESET, "reset")
	})
}

func TestASocketAllocatesNothing(t *testing.T) {
	s, _ := loaded(t, false, Config{})
	ln := listen(t, s, "tcp", "127.0.0.1:0")
	client := dial(t, ln, net.Dialer{})
	x := acceptRaw(t, ln)
	defer unix.Close(x.FD)
	c := s.TrackSocket(x)
	defer c.Release()
	p, buf := message(100), make([]byte, 200)
	n := testing.AllocsPerRun(500, func() {
		testkit.Result(client.Write(p)).Must(t)
		start := c.Offset()
		n, err := c.Read(buf)
		for errors.Is(err, ErrAgain) { // over loopback the data comes in a moment
			n, err = c.Read(buf)
		}
		if n != len(p) || err != nil {
			t.Fatal(n, err)
		}
		if a := c.Arrival(start, c.Offset()); a.Source != stamp.Exact {
			t.Fatalf("%+v", a)
		}
		if _, err := c.Read(buf); !errors.Is(err, ErrAgain) {
			t.Fatal(err)
		}
	})
	testkit.Equal(t, n, 0, "allocations per message")
}
