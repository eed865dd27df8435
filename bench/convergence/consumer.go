//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsq/wire"
)

// credit is RDY of a consumer: while it works on one message the next are on their
// way, so that the way of a FIN and that of the message that follows it are no part
// of the pace.
const credit = 4

// frameLimit bounds what a broker may send at once.
const frameLimit = 1 << 20

// pacer is a consumer's work: one message after the other, each takes the pace.
type pacer struct {
	pace time.Duration
	free mono.Time // when what came so far is done
}

// take says when a message that comes now is done.
func (p *pacer) take(now mono.Time) mono.Time {
	if p.free.Before(now) {
		p.free = now
	}
	p.free = p.free.Add(p.pace)
	return p.free
}

// consumers are one consumer of a channel for each of several brokers, driven by
// one thread with precise timers.
type consumers struct {
	// set once
	topic, channel string
	pace           time.Duration
	wake           int // eventfd: there is something in mu

	mu struct {
		sync.Mutex
		added     []*consumer
		connected map[string]bool // by address
	}

	// owned by Run until it has returned
	all  []*consumer
	late *obs.Latency // how much later than due messages were finished
}

// consumer is that of one broker.
type consumer struct {
	address string
	fd      int
	pacer   pacer
	held    []held // in the order in which they are done
	in      []byte
}

type held struct {
	id  wire.MessageID
	due mono.Time
}

func newConsumers(topic, channel string, pace time.Duration) (*consumers, error) {
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	c := &consumers{topic: topic, channel: channel, pace: pace, wake: wake, late: obs.NewLatency()}
	c.mu.connected = map[string]bool{}
	return c, nil
}

// Connected reports whether there is a consumer for the broker at address.
func (c *consumers) Connected(address string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.connected[address]
}

// Connect adds the consumer of the broker at address. It ends with its connection.
func (c *consumers) Connect(ctx context.Context, address string) error {
	fd, err := c.subscribe(ctx, address)
	if err != nil {
		return fmt.Errorf("consumer of %s: %w", address, err)
	}
	c.mu.Lock()
	c.mu.added = append(c.mu.added, &consumer{address: address, fd: fd, pacer: pacer{pace: c.pace}})
	c.mu.connected[address] = true
	c.mu.Unlock()
	return c.rouse()
}

func (c *consumers) rouse() error {
	_, err := unix.Write(c.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	return err
}

// subscribe returns a descriptor of its own that Go's poller does not know, or each
// message would wake that, too.
func (c *consumers) subscribe(ctx context.Context, address string) (fd int, err error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	identify, err := json.Marshal(wire.IdentifyRequest{ClientID: "paced", UserAgent: "srtm-convergence", OutputBufferTimeout: -1})
	if err != nil {
		return 0, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return 0, err
		}
	}
	out := wire.AppendSub(wire.AppendIdentify(wire.AppendMagic(nil), identify), c.topic, c.channel)
	if _, err := conn.Write(out); err != nil {
		return 0, err
	}
	for range 2 { // the answers; before RDY no message comes
		if err := answer(conn); err != nil {
			return 0, err
		}
	}
	if _, err := conn.Write(wire.AppendRdy(nil, credit)); err != nil {
		return 0, err
	}
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var dup error
	err = raw.Control(func(original uintptr) { fd, dup = unix.FcntlInt(original, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(err, dup)
}

// answer reads one response, and nothing that follows it.
func answer(r io.Reader) error {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return err
	}
	n, err := wire.FrameSize(size[:], frameLimit)
	if err != nil {
		return err
	}
	frame := append(size[:], make([]byte, n-len(size))...)
	if _, err := io.ReadFull(r, frame[len(size):]); err != nil {
		return err
	}
	t, data, _, err := wire.ParseFrame(frame, frameLimit)
	if err == nil && t != wire.FrameResponse {
		err = fmt.Errorf("%v %q in place of a response", t, data)
	}
	return err
}

// Run works until ctx ends, and closes all connections.
func (c *consumers) Run(ctx context.Context) (err error) {
	runtime.LockOSThread() // the thread ends with this goroutine
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("timer slack: %w", err)
	}
	// What it waits for a processor would count as the broker's latency.
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, urgency); err != nil && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("priority: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = c.rouse() })() // an eventfd that is full wakes, too
	defer func() {
		c.take()
		for _, s := range c.all {
			err = errors.Join(err, unix.Close(s.fd))
		}
	}()
	for ctx.Err() == nil {
		next := mono.Time(math.MaxInt64)
		for _, s := range c.all {
			if err := s.finish(clock.Mono(), c.late); err != nil {
				return fmt.Errorf("consumer of %s: %w", s.address, err)
			}
			if len(s.held) > 0 {
				next = min(next, s.held[0].due)
			}
		}
		if err := c.wait(next); err != nil {
			return err
		}
		c.all = slices.DeleteFunc(c.all, func(s *consumer) bool {
			over, broken := s.read()
			if broken != nil {
				err = errors.Join(err, fmt.Errorf("consumer of %s: %w", s.address, broken))
			}
			if over {
				err = errors.Join(err, unix.Close(s.fd))
				c.mu.Lock()
				delete(c.mu.connected, s.address)
				c.mu.Unlock()
			}
			return over
		})
		if err != nil {
			return err
		}
		c.take()
	}
	return nil
}

// urgency is the consumers' priority, where it is permitted.
const urgency = -10

// take makes those that were added its own.
func (c *consumers) take() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, c.mu.added...)
	c.mu.added = nil
}

// wait returns when there is something to read, or it is time.
func (c *consumers) wait(until mono.Time) error {
	fds := []unix.PollFd{{Fd: int32(c.wake), Events: unix.POLLIN}}
	for _, s := range c.all {
		fds = append(fds, unix.PollFd{Fd: int32(s.fd), Events: unix.POLLIN})
	}
	longest := unix.NsecToTimespec(max(0, int64(min(until.Sub(clock.Mono()), time.Minute))))
	if _, err := unix.Ppoll(fds, &longest, nil); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("ppoll: %w", err)
	}
	if fds[0].Revents != 0 {
		var count [8]byte
		if _, err := unix.Read(c.wake, count[:]); err != nil && !errors.Is(err, unix.EAGAIN) {
			return fmt.Errorf("eventfd: %w", err)
		}
	}
	return nil
}

// close releases what newConsumers took. Requires: Run has returned, and nobody
// connects.
func (c *consumers) close() error { return unix.Close(c.wake) }

// finish answers what is done by now.
func (s *consumer) finish(now mono.Time, late *obs.Latency) error {
	var out []byte
	n := 0
	for n < len(s.held) && !now.Before(s.held[n].due) {
		late.Record(now.Sub(s.held[n].due))
		out = wire.AppendFin(out, s.held[n].id)
		n++
	}
	s.held = slices.Delete(s.held, 0, n)
	return s.write(out)
}

func (s *consumer) write(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	// A few short commands: there is room for them, or something is wrong.
	n, err := unix.Write(s.fd, b)
	if errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		return nil // read says so as well
	}
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	return err
}

// read takes what is there. over: the connection has ended, or is of no use any
// more.
func (s *consumer) read() (over bool, err error) {
	for {
		s.in = slices.Grow(s.in, 4096)
		n, err := unix.Read(s.fd, s.in[len(s.in):cap(s.in)])
		switch {
		case errors.Is(err, unix.EAGAIN):
			return false, nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ECONNRESET), err == nil && n == 0:
			return true, nil // the topic has left this broker
		case err != nil:
			return true, err
		}
		s.in = s.in[:len(s.in)+n]
		used := 0
		for {
			t, data, n, err := wire.ParseFrame(s.in[used:], frameLimit)
			if err != nil {
				return true, err
			}
			if n == 0 {
				break
			}
			if err := s.frame(t, data); err != nil {
				return true, err
			}
			used += n
		}
		s.in = slices.Delete(s.in, 0, used)
	}
}

func (s *consumer) frame(t wire.FrameType, data []byte) error {
	switch t {
	case wire.FrameMessage:
		m, err := wire.ParseMessage(data)
		if err != nil {
			return err
		}
		s.held = append(s.held, held{m.ID, s.pacer.take(clock.Mono())})
		return nil
	case wire.FrameResponse:
		if string(data) == wire.Heartbeat {
			return s.write(wire.AppendNop(nil))
		}
		return nil
	default:
		return fmt.Errorf("%v %q", t, data)
	}
}
