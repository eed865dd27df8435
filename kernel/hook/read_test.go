package hook_test

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func open(t testing.TB, mode hook.Mode, cfg hook.Config) *hook.Stamper {
	t.Helper()
	s, err := hook.Open(mode, cfg, quiet())
	testkit.Must(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

// pipe returns both ends of an in-memory connection.
func pipe(t testing.TB) (client, server net.Conn) {
	client, server = net.Pipe()
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, server
}

func send(t testing.TB, c net.Conn, p []byte) (wait func()) {
	t.Helper()
	done := make(chan error, 1)
	go func() { _, err := c.Write(p); done <- err }()
	return func() {
		t.Helper()
		testkit.Must(t, <-done)
	}
}

func TestReadTimeLiesBetweenTheWriteAndTheCall(t *testing.T) {
	for _, mode := range []hook.Mode{hook.Off, hook.Auto} { // a pipe has no socket in the kernel
		client, server := pipe(t)
		s := open(t, mode, hook.Config{})
		c := s.Track(server)
		buf := make([]byte, 8)
		for i := range int64(10) {
			before := clock.Mono()
			wait := send(t, client, []byte("12345678"))
			testkit.Result(io.ReadFull(c, buf)).Must(t)
			after := clock.Mono()
			wait()
			a := c.Arrival(i*8, i*8+8)
			if a.Source != stamp.Read || a.At.Before(before) || after.Before(a.At) {
				t.Fatalf("%s: message %d: %v at %d, want read within [%d, %d]", mode, i, a.Source, a.At, before, after)
			}
			testkit.MustEqual(t, c.Offset(), i*8+8, "%s: Offset()", mode)
		}
		testkit.Equal(t, s.Info().Counters.Arrivals[stamp.Read], 10, "%s: counted read stamps", mode)
		c.Release()
		c.Release()
	}
}

func TestReadTimeAllocatesNothing(t *testing.T) {
	client, server := pipe(t)
	c := open(t, hook.Off, hook.Config{}).Track(server)
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		p := make([]byte, 64)
		for {
			if _, err := client.Write(p); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, 64)
	var at int64
	allocs := testing.AllocsPerRun(1000, func() {
		n := testkit.Result(c.Read(buf)).Must(t)
		c.Arrival(at, at+int64(n))
		at += int64(n)
	})
	server.Close()
	<-stop
	testkit.Equal(t, allocs, 0, "allocations per read")
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	for _, tc := range []struct {
		mode hook.Mode
		cfg  hook.Config
		want string
	}{
		{"kprobe", hook.Config{}, `"kprobe"`},
		{hook.Auto, hook.Config{RingRecords: 100}, "100 is not a power of two"},
		{hook.Auto, hook.Config{RingRecords: 32}, "64 to 1024"},
		{hook.Auto, hook.Config{MaxConns: -1, RingRecords: 4096}, "-1 is not in 1 to 1048576\nrecords"},
	} {
		s, err := hook.Open(tc.mode, tc.cfg, quiet())
		if err == nil || s != nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("Open(%q, %+v) = %v, %v, want an error with %q", tc.mode, tc.cfg, s, err, tc.want)
		}
	}
}

func TestOffIsOff(t *testing.T) {
	s := open(t, hook.Off, hook.Config{})
	in := s.Info()
	if in.Source != "read" || in.Mode != hook.Off || in.Kernel == "" {
		t.Errorf("Info() = %+v", in)
	}
	if err := s.Control("tcp", "127.0.0.1:0", failingConn{}); err != nil {
		t.Errorf("Control does something although off: %v", err)
	}
}

// failingConn fails every use.
type failingConn struct{}

func (failingConn) Control(func(uintptr)) error    { return errors.New("used") }
func (failingConn) Read(func(uintptr) bool) error  { return errors.New("used") }
func (failingConn) Write(func(uintptr) bool) error { return errors.New("used") }

// In a queue ordered by arrival, a connection's messages must not overtake each other.
func TestArrivalsOfAConnectionNeverDecrease(t *testing.T) {
	client, server := pipe(t)
	c := open(t, hook.Off, hook.Config{}).Track(server)
	buf := make([]byte, 8)
	wait := send(t, client, []byte("12345678"))
	testkit.Result(io.ReadFull(c, buf)).Must(t)
	wait()
	late := c.Arrival(0, 16) // requested too early: the stamp is the present time
	wait = send(t, client, []byte("12345678"))
	testkit.Result(io.ReadFull(c, buf)).Must(t)
	wait()
	if a := c.Arrival(0, 4); a != late {
		t.Errorf("%v at %d, want that of the message before, %v at %d", a.Source, a.At, late.Source, late.At)
	}
	if a := c.Arrival(8, 16); a.At.Before(late.At) {
		t.Errorf("%v before the message ahead of it", late.At.Sub(a.At))
	}
}
