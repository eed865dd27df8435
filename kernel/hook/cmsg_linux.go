package hook

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// clockStep is the smallest jump of CLOCK_REALTIME against CLOCK_MONOTONIC that cannot be slewing.
// Earlier stamps are useless after such a jump.
const clockStep = mono.Time(time.Millisecond)

// trustedAge is the maximum age of a credible timestamp on a connection with reordered segments. A
// segment that waits for a gap to be filled keeps its old time, and a peer can keep a gap open on
// purpose.
const trustedAge = time.Millisecond

// timestamping uses socket timestamps. With each recvmsg the kernel returns the arrival time of the
// segment with the last byte. The kernel merges waiting segments and keeps only the latest time, so
// the stamps are upper bounds. No privilege is required.
type timestamping struct {
	// atomic: reads without a credible stamp
	missing atomic.Uint64
}

func openTimestamping(Config) (source, error) {
	t := &timestamping{}
	if err := selfTest(t, stamp.UpperBound); err != nil {
		return nil, fmt.Errorf("self-test: %w", err)
	}
	t.missing.Store(0)
	return t, nil
}

func (t *timestamping) name() string { return string(Timestamping) }
func (t *timestamping) note() string { return "" }
func (t *timestamping) close() error { return nil }

func (t *timestamping) counters(c *Counters) { c.StampsMissing = t.missing.Load() }

func (t *timestamping) control(c syscall.RawConn) error {
	return setsockopt(c, unix.SO_TIMESTAMPING, unix.SOF_TIMESTAMPING_RX_SOFTWARE|unix.SOF_TIMESTAMPING_SOFTWARE)
}

func (t *timestamping) track(_ readable, rc syscall.RawConn) (tracker, error) {
	now, wall := together(clock.Mono, clock.Wall)
	c := &cmsgConn{t: t, rc: rc, clocks: clocks{offset: mono.Time(wall) - now}}
	c.msg.Iov = &c.iov
	c.msg.Iovlen = 1
	c.msg.Control = &c.oob[0]
	c.recv, c.ask = c.recvmsg, c.tcpInfo
	return c, nil
}

// The control message: a header of one word for the length and two ints, then three timespecs. The
// first timespec is the software stamp.
const (
	cmsgData = unix.SizeofCmsghdr
	cmsgLen  = cmsgData + 3*int(unsafe.Sizeof(unix.Timespec{}))
)

// cmsgConn reads one connection with recvmsg.
type cmsgConn struct {
	// set once
	t    *timestamping
	recv func(fd uintptr) bool // recvmsg as a func value, made once to save allocations
	ask  func(fd uintptr)      // tcpInfo, for the same reason

	// owned by the reader; the kernel writes only during recvmsg
	rc    syscall.RawConn
	msg   unix.Msghdr
	iov   unix.Iovec
	oob   [(cmsgLen + 15) &^ 7]byte
	n     int
	errno syscall.Errno
	// reordered is true once a segment has come out of order.
	reordered bool
	// stamps holds the kernel's time of each read, 0 for a read without a time.
	stamps stamp.Reads[mono.Time]
	clocks clocks
}

// together reads both clocks at most clockSlack apart. A pause of the process between the two readings
// would look like a step of the wall clock. After a few readings with a pause, together returns the last.
func together(monotonic func() mono.Time, realtime func() mono.Wall) (now mono.Time, wall mono.Wall) {
	for range 5 {
		if now, wall = monotonic(), realtime(); monotonic().Sub(now) <= clockSlack {
			break
		}
	}
	return now, wall
}

// clocks converts the kernel's times of one connection.
type clocks struct {
	offset  mono.Time // CLOCK_REALTIME minus CLOCK_MONOTONIC at the last read
	stepped mono.Time // when a read noticed the last step; 0: no step
}

// convert converts a time of the kernel after a read at now. It returns false if the segment may have
// arrived before a step of CLOCK_REALTIME. Segments may wait in the socket for several reads after the
// step. After a step back such a segment may seem to have arrived later, which an upper bound allows.
func (c *clocks) convert(wall mono.Wall, now mono.Time, nowWall mono.Wall) (at mono.Time, ok bool) {
	offset := mono.Time(nowWall) - now
	if step := offset - c.offset; step > clockStep || step < -clockStep {
		c.stepped = now
	}
	c.offset = offset
	at = mono.Time(wall) - offset
	return at, at > c.stepped
}

func (c *cmsgConn) recvmsg(fd uintptr) bool {
	for {
		c.msg.SetControllen(len(c.oob))
		n, _, errno := unix.Syscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&c.msg)), 0)
		if errno == unix.EINTR {
			continue
		}
		c.n, c.errno = int(n), errno
		return errno != unix.EAGAIN
	}
}

func (c *cmsgConn) tcpInfo(fd uintptr) {
	var info unix.TCPInfo
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.IPPROTO_TCP, unix.TCP_INFO, uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	c.reordered = errno != 0 || info.Rcv_ooopack > 0
}

// believed reports whether a timestamp of that age belongs to the last segment of the read, rather
// than to a segment that waited for a gap to be filled.
func (c *cmsgConn) believed(age time.Duration) bool {
	if age > trustedAge && !c.reordered && c.rc.Control(c.ask) != nil {
		return false
	}
	return age <= trustedAge || !c.reordered
}

func (c *cmsgConn) move(_ readable, rc syscall.RawConn) { c.rc = rc }

func (c *cmsgConn) read(p []byte, end int64) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.iov.Base = &p[0]
	c.iov.SetLen(len(p))
	err := c.rc.Read(c.recv)
	c.iov.Base = nil
	switch {
	case err != nil:
		return 0, err
	case c.errno != 0:
		return 0, &net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("recvmsg", c.errno)}
	case c.n == 0:
		return 0, io.EOF
	}
	c.stamps.Note(end+int64(c.n), c.kernelTime())
	return c.n, nil
}

// kernelTime returns the time of the last recvmsg. It returns 0 if there was no time, the clock has
// stepped, or the time may belong to another segment.
func (c *cmsgConn) kernelTime() mono.Time {
	wall, ok := c.wallTime()
	now, nowWall := together(clock.Mono, clock.Wall)
	at, sure := c.clocks.convert(wall, now, nowWall)
	if !ok || !sure || now.Add(clockSlack).Before(at) || !c.believed(now.Sub(at)) {
		c.t.missing.Add(1)
		return 0
	}
	return at
}

func (c *cmsgConn) wallTime() (mono.Wall, bool) {
	if int(c.msg.Controllen) < cmsgLen {
		return 0, false
	}
	h := (*unix.Cmsghdr)(unsafe.Pointer(&c.oob[0]))
	if int(h.Len) < cmsgLen || h.Level != unix.SOL_SOCKET || h.Type != unix.SCM_TIMESTAMPING {
		return 0, false
	}
	var sec, nsec int64
	if d := c.oob[cmsgData:]; unsafe.Sizeof(unix.Timespec{}) == 16 {
		sec, nsec = int64(binary.NativeEndian.Uint64(d)), int64(binary.NativeEndian.Uint64(d[8:]))
	} else {
		sec, nsec = int64(int32(binary.NativeEndian.Uint32(d))), int64(int32(binary.NativeEndian.Uint32(d[4:])))
	}
	return mono.Wall(sec*1e9 + nsec), sec != 0
}

func (c *cmsgConn) arrival(_, end int64, read mono.Time) (stamp.Arrival, bool) {
	at, ok := c.stamps.At(end - 1)
	if !ok || at == 0 {
		return stamp.Arrival{}, false
	}
	return stamp.Arrival{At: at, Source: stamp.UpperBound}, true
}

// ignore stops the control messages. Stamping itself is switched for the whole host.
func (c *cmsgConn) ignore() error { return setsockopt(c.rc, unix.SO_TIMESTAMPING, 0) }

func (c *cmsgConn) release() {}
