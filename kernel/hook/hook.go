package hook

import (
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"net"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// Mode says which source of arrival times is wanted.
type Mode string

const (
	// Auto takes the best source that works here; opening never fails.
	Auto Mode = "auto"
	// EBPF takes the eBPF socket filter; opening fails where it does not work.
	EBPF Mode = "ebpf"
	// Timestamping takes socket timestamps; opening fails where they do not work.
	Timestamping Mode = "sotimestamp"
	// Off takes the time after the read.
	Off Mode = "off"
)

// ParseMode returns the mode of that name, as a flag spells it.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case Auto, EBPF, Timestamping, Off:
		return m, nil
	}
	return "", fmt.Errorf("arrival stamps %q: want auto, ebpf, sotimestamp or off", s)
}

// ErrUnsupported says that a source does not exist on this system or kernel.
var ErrUnsupported = errors.New("not supported here")

// Config sizes the eBPF source. The zero value means the defaults.
type Config struct {
	// PinDir is a bpffs directory made by Pin, whose objects are used instead
	// of loading the program; empty loads it, which takes privileges.
	PinDir string
	// MaxConns is how many connections can have a record ring at once (1 to
	// 1,048,576); those beyond it use the time after the read. Default 16,384.
	// Memory is taken as connections come, not up front. With PinDir the
	// number chosen by Pin holds.
	MaxConns int
	// RingRecords is how many segments a ring remembers: a power of two, 64 to
	// 1,024, 16 bytes each. It must exceed the rate of segments on one
	// connection times the longest time its reader may be late. Default 128.
	// With PinDir the number chosen by Pin holds.
	RingRecords int
}

const (
	defaultMaxConns    = 16384
	defaultRingRecords = 128
	limitMaxConns      = 1 << 20
)

func (c Config) withDefaults() Config {
	if c.MaxConns == 0 {
		c.MaxConns = defaultMaxConns
	}
	if c.RingRecords == 0 {
		c.RingRecords = defaultRingRecords
	}
	return c
}

// Validate reports every value that is out of its range.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs faults.List
	errs.If(c.MaxConns < 1 || c.MaxConns > limitMaxConns, "connections with a record ring: %d is not in 1 to %d", c.MaxConns, limitMaxConns)
	r := c.RingRecords
	errs.If(r < stamp.MinRing || r > stamp.MaxRing || bits.OnesCount(uint(r)) != 1, "records per ring: %d is not a power of two in %d to %d", r, stamp.MinRing, stamp.MaxRing)
	return errs.Err()
}

// source is what a kernel-backed kind of stamp gives a Stamper.
type source interface {
	// note says what the source has to do without; empty if nothing.
	note() string
	// control prepares a listening socket, so that its connections inherit
	// what they need.
	control(c syscall.RawConn) error
	// track starts stamping one connection. An error leaves it to the time after
	// the read.
	track(l readable, rc syscall.RawConn) (tracker, error)
	// name is the source as Info spells it.
	name() string
	// counters adds the source's own counts.
	counters(*Counters)
	close() error
}

// tracker stamps one connection. Its methods are called by the connection's
// reader only.
type tracker interface {
	// read reads like readable.Read. end is the stream offset before it.
	read(p []byte, end int64) (int, error)
	// move goes on with another descriptor of the same socket.
	move(l readable, rc syscall.RawConn)
	// arrival returns when the bytes [start, end) were complete, or ok false
	// if this message's record does not exist. read is when the last of them
	// was read.
	arrival(start, end int64, read mono.Time) (a stamp.Arrival, ok bool)
	// ignore stops the stamping; only release may be called after it.
	ignore() error
	release()
}

// Stamper opens and follows the arrival times of a process's connections. Its
// methods may be called by any goroutine.
type Stamper struct {
	// set once
	log    *slog.Logger
	mode   Mode
	src    source // nil: the time after the read
	reason string
	kernel string
	pinned bool

	// atomic: counts, read only for display
	arrivals [countShards]arrivalCounts
	nextConn atomic.Uint32
	refused  atomic.Uint64
}

// countShards spreads the counting of messages over cache lines, so that
// readers on different cores do not take turns on one.
const countShards = 16

type arrivalCounts struct {
	by [stamp.Sources]atomic.Uint64
	_  [64 - 8*stamp.Sources]byte
}

// Open probes for the source that mode asks for, tests it with messages to
// itself over loopback, and returns a Stamper that uses it. With Auto and Off
// it fails only on a bad config.
func Open(mode Mode, cfg Config, log *slog.Logger) (*Stamper, error) {
	if _, err := ParseMode(string(mode)); err != nil {
		return nil, err
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Stamper{log: log, mode: mode, kernel: kernelRelease()}
	if mode == Off {
		s.reason = "switched off"
		s.logChoice()
		return s, nil
	}
	var tried error
	for _, kind := range sources {
		if mode != Auto && mode != kind.mode {
			continue
		}
		src, err := kind.open(cfg.withDefaults())
		if err == nil {
			s.src = src
			s.pinned = kind.mode == EBPF && cfg.PinDir != ""
			break
		}
		tried = errors.Join(tried, fmt.Errorf("%s: %w", kind.mode, err))
	}
	if tried != nil {
		s.reason = oneLine(tried)
	}
	if s.src == nil && mode != Auto {
		if tried == nil {
			tried = ErrUnsupported
		}
		return nil, fmt.Errorf("arrival stamps: %w", tried)
	}
	s.logChoice()
	return s, nil
}

// kind is a source of stamps that this system may have; sources lists them
// best first.
type kind struct {
	mode Mode
	open func(Config) (source, error)
}

func (s *Stamper) logChoice() {
	attrs := []any{"source", s.sourceName(), "mode", s.mode, "kernel", s.kernel}
	if reason := s.why(); reason != "" {
		attrs = append(attrs, "reason", reason)
	}
	s.log.Info("arrival stamps", attrs...)
}

// Control prepares a listening socket: it is for net.ListenConfig.Control,
// whose owner must also call SetMultipathTCP(false), since the kernel refuses
// socket filters on MPTCP sockets, Go's default. A refusal by the kernel is an
// error only if the mode is not Auto; connections of a listener that was not
// prepared use the time after the read.
func (s *Stamper) Control(network, address string, c syscall.RawConn) error {
	if s.src == nil {
		return nil
	}
	if err := s.src.control(c); err != nil {
		if s.mode == Auto {
			s.log.Warn("arrival stamps: listener not prepared, its connections use the time after the read",
				"address", address, "error", err)
			return nil
		}
		return fmt.Errorf("arrival stamps: prepare listener on %s %s: %w", network, address, err)
	}
	return nil
}

// Track starts stamping a connection accepted from a listener that Control
// prepared. It must be called before anything is read. It never fails: a
// connection that cannot be stamped by the kernel uses the time after the
// read.
func (s *Stamper) Track(c net.Conn) *Conn {
	rc, err := rawConn(c)
	return s.follow(c, rc, err)
}

// follow starts stamping. rc is l's, or err says why there is none.
func (s *Stamper) follow(l readable, rc syscall.RawConn, err error) *Conn {
	c := &Conn{s: s, conn: l, shard: s.nextConn.Add(1) % countShards}
	if s.src == nil {
		return c
	}
	if err == nil {
		c.tr, err = s.src.track(l, rc)
	}
	if err != nil {
		c.tr = nil
		s.refused.Add(1)
		s.log.Debug("arrival stamps: connection uses the time after the read", "remote", l.RemoteAddr(), "error", err)
	}
	return c
}

// readable is what bytes are read from: a net.Conn, or a Socket.
type readable interface {
	Read(p []byte) (int, error)
	RemoteAddr() net.Addr
}

func rawConn(nc net.Conn) (syscall.RawConn, error) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return nil, ErrUnsupported
	}
	return sc.SyscallConn()
}

// Info describes a Stamper, for logs, /info and metrics.
type Info struct {
	// Mode is what was asked for, Source what is used: "ebpf", "sotimestamp"
	// or "read".
	Mode   Mode   `json:"mode"`
	Source string `json:"source"`
	// Reason says why no better source is used, or what the source has to do
	// without; empty if nothing could be better.
	Reason string `json:"reason,omitempty"`
	// Kernel is the running kernel's release.
	Kernel string `json:"kernel"`
	// Pinned says that the program was loaded by another process.
	Pinned bool `json:"pinned"`

	Counters Counters `json:"counters"`
}

// Counters are counts since Open, but for those that say "now".
type Counters struct {
	// Arrivals counts messages by the source of their stamp, a batch once, indexed
	// by stamp.Source.
	Arrivals [stamp.Sources]uint64 `json:"arrivals"`
	// ConnsRefused counts connections that Track could not stamp by kernel.
	ConnsRefused uint64 `json:"conns_refused"`
	// Rings is how many connections own a record ring now, RingsMost how many
	// could, RingsRefused how often a connection asked and none was free.
	Rings        uint64 `json:"rings"`
	RingsMost    uint64 `json:"rings_most"`
	RingsRefused uint64 `json:"rings_refused"`
	// RecordsLost counts records overwritten before they were read: rings were
	// too small or readers too late.
	RecordsLost uint64 `json:"records_lost"`
	// SegmentsEarly counts segments that arrived before their connection owned
	// a ring (the last 8 of a connection are kept for it). SegmentsEarlyLost
	// counts those that found no place at all.
	SegmentsEarly     uint64 `json:"segments_early"`
	SegmentsEarlyLost uint64 `json:"segments_early_lost"`
	// SegmentsNoBase counts segments met while it could not be told where the
	// stream starts; ConnsNoBase counts connections for which that stayed so,
	// and which use the time after the read.
	SegmentsNoBase uint64 `json:"segments_no_base"`
	ConnsNoBase    uint64 `json:"conns_no_base"`
	// StampsMissing counts reads that came without a socket timestamp, or with
	// one that meant nothing because the wall clock had been set, or because
	// segments had come out of order.
	StampsMissing uint64 `json:"stamps_missing"`
	// SegmentsForeign counts segments that met a ring already given to another
	// connection; they were not recorded.
	SegmentsForeign uint64 `json:"segments_foreign"`
	// SegmentsListen counts data segments that arrived on a listening socket,
	// before their connection existed (TCP Fast Open, TCP_DEFER_ACCEPT).
	SegmentsListen uint64 `json:"segments_listen"`
}

// Now is the arrival of a message that did not come by a connection that is tracked,
// as over HTTP: the time after its read. It is counted as others are.
func (s *Stamper) Now() stamp.Arrival {
	s.arrivals[0].by[stamp.Read].Add(1)
	return stamp.Arrival{At: clock.Mono(), Source: stamp.Read}
}

// Info returns the source in use and its counts.
func (s *Stamper) Info() Info {
	in := Info{Mode: s.mode, Source: s.sourceName(), Reason: s.why(), Kernel: s.kernel, Pinned: s.pinned}
	for i := range s.arrivals {
		for j := range s.arrivals[i].by {
			in.Counters.Arrivals[j] += s.arrivals[i].by[j].Load()
		}
	}
	in.Counters.ConnsRefused = s.refused.Load()
	if s.src != nil {
		s.src.counters(&in.Counters)
	}
	return in
}

// Close frees what the kernel holds for the Stamper. Connections still open
// must have been released; they and their sockets go on, without stamps.
func (s *Stamper) Close() error {
	if s.src == nil {
		return nil
	}
	return s.src.close()
}

// why says why things are not better, as far as known by now.
func (s *Stamper) why() string {
	reason := s.reason
	if s.src == nil {
		return reason
	}
	note := s.src.note()
	if reason != "" && note != "" {
		reason += "; "
	}
	return reason + note
}

func (s *Stamper) sourceName() string {
	if s.src == nil {
		return "read"
	}
	return s.src.name()
}

// oneLine joins the lines of a joined error.
func oneLine(err error) string {
	return strings.ReplaceAll(memlock.ReplaceAllString(err.Error(), ""), "\n", "; ")
}

// memlock is advice of the BPF library to developers. An operator reads what is missing in
// docs/arrival-stamps.md and from srtm doctor.
var memlock = regexp.MustCompile(` ?\(MEMLOCK may be too low[^)]*\)`)
