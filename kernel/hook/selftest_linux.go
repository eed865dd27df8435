package hook

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
)

const (
	// testMessages is the number of test messages.
	testMessages = 4
	// testPatience bounds the self-test. On loopback the test takes well under a millisecond.
	testPatience = 3 * time.Second
	// clockSlack is the accepted difference between the kernel's time and ours: our clock is
	// calibrated once, and NTP slews the kernel's clock.
	clockSlack = 100 * time.Microsecond
)

// errUntimely reports a stamp outside the interval in which the message must have arrived.
var errUntimely = errors.New("a message to ourselves got an impossible time")

// tryOut runs the self-test. In a time namespace the kernel's clock differs from ours by a
// constant, which tryOut determines.
func (f *filter) tryOut() error {
	// After the self-test no program run uses its slot, so the slot need not rest.
	f.slots.quarantine = 0
	defer func() { f.slots.quarantine = restTime }()
	err := selfTest(f, stamp.Exact)
	if !errors.Is(err, errUntimely) {
		return err
	}
	shift, shiftErr := clockShift("/proc/self/timens_offsets")
	if shiftErr != nil || shift == 0 {
		return errors.Join(err, shiftErr)
	}
	f.shift = shift
	return selfTest(f, stamp.Exact)
}

// selfTest requires a stamp with source want for each message, between the time before the write
// and the time after the read. If src is not exact, the first messages may lack a stamp, because
// the kernel enables socket timestamps lazily.
func selfTest(src source, want stamp.Source) error {
	deadline := time.Now().Add(testPatience)
	s := &Stamper{log: slog.New(slog.DiscardHandler), src: src}
	client, server, err := loopback(s, deadline)
	if err != nil {
		return err
	}
	defer client.Close()
	defer server.Close()
	c := s.Track(server)
	defer c.Release()
	if c.tr == nil {
		return errors.New("the connection could not be tracked")
	}
	var msg [64]byte
	for stamped := 0; stamped < testMessages; {
		before := clock.Mono()
		if _, err := client.Write(msg[:]); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		start := c.Offset()
		if _, err := io.ReadFull(c, msg[:]); err != nil {
			return fmt.Errorf("read: %w", err)
		}
		after := clock.Mono()
		a, ok := c.tr.arrival(start, c.Offset(), after)
		switch {
		case !ok && want != stamp.Exact && time.Now().Before(deadline):
			continue
		case !ok || a.Source != want:
			return fmt.Errorf("message %d to ourselves got no %v stamp (%+v)", stamped, want, a)
		case a.At.Before(before.Add(-clockSlack)) || after.Add(clockSlack).Before(a.At):
			return fmt.Errorf("%w: %v after the write, %v before the end of the read", errUntimely, a.At.Sub(before), after.Sub(a.At))
		}
		stamped++
	}
	return nil
}

// loopback returns both ends of a connection from a listener that s prepared.
func loopback(s *Stamper, deadline time.Time) (client, server net.Conn, err error) {
	lc := net.ListenConfig{Control: s.Control}
	lc.SetMultipathTCP(false)
	ln, err := listenLoopback(&lc)
	if err != nil {
		return nil, nil, err
	}
	defer ln.Close()
	d := net.Dialer{Deadline: deadline}
	d.SetMultipathTCP(false)
	if client, err = d.Dial("tcp", ln.Addr().String()); err != nil {
		return nil, nil, err
	}
	if err = ln.(*net.TCPListener).SetDeadline(deadline); err == nil {
		if server, err = ln.Accept(); err == nil {
			if err = errors.Join(client.SetDeadline(deadline), server.SetDeadline(deadline)); err == nil {
				return client, server, nil
			}
			server.Close()
		}
	}
	client.Close()
	return nil, nil, err
}

// clockShift returns how far CLOCK_MONOTONIC in this namespace is ahead of the host's.
func clockShift(path string) (mono.Time, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, fmt.Errorf("time namespace: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var sec, nsec int64
		if rest, ok := strings.CutPrefix(lines.Text(), "monotonic"); ok {
			if _, err := fmt.Sscan(rest, &sec, &nsec); err != nil {
				return 0, fmt.Errorf("time namespace: %q: %w", lines.Text(), err)
			}
			return mono.Time(sec*1e9 + nsec), nil
		}
	}
	return 0, lines.Err()
}

func listenLoopback(lc *net.ListenConfig) (net.Listener, error) {
	v4, err := lc.Listen(context.Background(), "tcp4", "127.0.0.1:0")
	if err == nil {
		return v4, nil
	}
	v6, err6 := lc.Listen(context.Background(), "tcp6", "[::1]:0")
	if err6 == nil {
		return v6, nil
	}
	return nil, errors.Join(err, err6)
}
