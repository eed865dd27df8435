package hook

import (
	"errors"
	"flag"
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

// Mode selects the source of arrival times.
type Mode string

const (
	// Auto uses the best source that works here. Open never fails.
	Auto Mode = "auto"
	// EBPF uses the eBPF socket filter. Open fails if the filter does not work.
	EBPF Mode = "ebpf"
	// Timestamping uses socket timestamps. Open fails if they do not work.
	Timestamping Mode = "sotimestamp"
	// Off uses the time after the read.
	Off Mode = "off"
)

// ParseMode returns the mode with a flag's spelling.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case Auto, EBPF, Timestamping, Off:
		return m, nil
	}
	return "", fmt.Errorf("arrival stamps %q: want auto, ebpf, sotimestamp or off", s)
}

// ErrUnsupported reports that this system or kernel does not have a source.
var ErrUnsupported = errors.New("not supported here")

// Config sizes the eBPF source. Zero values select the defaults.
type Config struct {
	// PinDir is a bpffs directory made by Pin. Its objects are used instead of loading the program.
	// If PinDir is empty, Open loads the program, which requires privileges.
	PinDir string
	// MaxConns is the maximum number of connections with a record ring (1 to 1,048,576). Further
	// connections use the time after the read. Default 16,384. Memory is allocated as connections
	// come. With PinDir, Pin's value applies.
	MaxConns int
	// RingRecords is the number of segments in a ring: a power of two, 64 to 1,024, 16 bytes each.
	// It must exceed a connection's segment rate times the longest delay of its reader. Default
	// 128. With PinDir, Pin's value applies.
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

// Flags defines the flags of arrival stamps.
func (c *Config) Flags(fs *flag.FlagSet, mode *Mode) {
	fs.StringVar((*string)(mode), "arrival-stamps", string(Auto), "`source` of arrival times: auto, ebpf, sotimestamp or off")
	fs.IntVar(&c.MaxConns, "arrival-stamps-connections", 0, "maximum number of `publishers` that ebpf follows at once (default 16384)")
	fs.StringVar(&c.PinDir, "arrival-stamps-dir", "", "`folder` in a BPF file system with the program that --pin-arrival-stamps left there, which needs no privileges (default none: load it)")
}

// CheckFlags returns all problems of the flags' values.
func (c *Config) CheckFlags(mode Mode) error {
	var errs faults.List
	_, err := ParseMode(string(mode))
	errs.If(err != nil, "--arrival-stamps: %w", err)
	errs.If(c.MaxConns < 0, "--arrival-stamps-connections %d is below 0", c.MaxConns)
	err = c.Validate()
	errs.If(err != nil && c.MaxConns > 0, "--arrival-stamps-connections: %w", err)
	errs.If(c.PinDir != "" && mode != Auto && mode != EBPF, "--arrival-stamps-dir is of no use with --arrival-stamps=%s", mode)
	return errs.Err()
}

// Validate reports every value that is out of range.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs faults.List
	errs.If(c.MaxConns < 1 || c.MaxConns > limitMaxConns, "connections with a record ring: %d is not in 1 to %d", c.MaxConns, limitMaxConns)
	r := c.RingRecords
	errs.If(r < stamp.MinRing || r > stamp.MaxRing || bits.OnesCount(uint(r)) != 1, "records per ring: %d is not a power of two in %d to %d", r, stamp.MinRing, stamp.MaxRing)
	return errs.Err()
}

// source is a kernel source of stamps.
type source interface {
	// note returns the source's limitations; empty if none.
	note() string
	// control prepares a listening socket, so that its connections inherit what they need.
	control(c syscall.RawConn) error
	// track starts stamping a connection. On an error the connection uses the time after the read.
	track(l readable, rc syscall.RawConn) (tracker, error)
	// name returns the source's name in Info.
	name() string
	// counters adds the source's counters.
	counters(*Counters)
	close() error
}

// tracker stamps one connection. Only the connection's reader calls it.
type tracker interface {
	// read reads like readable.Read. end is the stream offset before the read.
	read(p []byte, end int64) (int, error)
	// move continues with another descriptor of the same socket.
	move(l readable, rc syscall.RawConn)
	// arrival returns when the bytes [start, end) were complete. ok is false if the message has no
	// record. read is the time at which the last byte was read.
	arrival(start, end int64, read mono.Time) (a stamp.Arrival, ok bool)
	// ignore stops stamping. Only release may be called after ignore.
	ignore() error
	release()
}

// Stamper determines the arrival times of a process's connections. Any goroutine may call its
// methods.
type Stamper struct {
	// set once
	log    *slog.Logger
	mode   Mode
	src    source // nil: the time after the read
	reason string
	kernel string
	pinned bool

	// atomic: counters for display
	arrivals [countShards]arrivalCounts
	nextConn atomic.Uint32
	refused  atomic.Uint64
}

// countShards spreads the message counters over cache lines, so that readers on different cores do
// not contend.
const countShards = 16

type arrivalCounts struct {
	bySource [stamp.Sources]atomic.Uint64
	_        [64 - 8*stamp.Sources]byte
}

// Open opens a source for mode, tests it with messages over loopback, and returns a Stamper. With
// Auto and Off, Open fails only for a bad config.
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

// kind is a source of stamps that this system may have. sources lists the kinds, best first.
type kind struct {
	mode Mode
	open func(Config) (source, error)
}

func (s *Stamper) logChoice() {
	attrs := []any{"source", s.sourceName(), "mode", s.mode, "kernel", s.kernel}
	if reason := s.unbasedReason(); reason != "" {
		attrs = append(attrs, "reason", reason)
	}
	s.log.Info("arrival stamps", attrs...)
}

// Control prepares a listening socket. Use it as net.ListenConfig.Control, and call
// SetMultipathTCP(false), because the kernel refuses socket filters on MPTCP sockets, which are
// Go's default. With Auto, a refusal by the kernel is not an error: connections of the listener use
// the time after the read.
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

// Track starts stamping a connection accepted from a listener that Control prepared. Call Track
// before the first read. Track never fails: a connection that the kernel cannot stamp uses the time
// after the read.
func (s *Stamper) Track(c net.Conn) *Conn {
	rc, err := rawConn(c)
	return s.follow(c, rc, err)
}

// follow starts stamping. rc belongs to l; if err is not nil, there is no rc.
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

// readable is a net.Conn or a Socket.
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

// Info describes a Stamper for logs, /info and metrics.
type Info struct {
	// Mode is the requested mode. Source is the source in use: "ebpf", "sotimestamp" or "read".
	Mode   Mode   `json:"mode"`
	Source string `json:"source"`
	// Reason is why no better source is used, or the limitations of the source. It is empty for
	// the best source without limitations.
	Reason string `json:"reason,omitempty"`
	// Kernel is the running kernel's release.
	Kernel string `json:"kernel"`
	// Pinned means that another process loaded the program.
	Pinned bool `json:"pinned"`

	Counters Counters `json:"counters"`
}

// Counters are counts since Open, except current values.
type Counters struct {
	// Arrivals counts messages by stamp.Source. A batch counts once.
	Arrivals [stamp.Sources]uint64 `json:"arrivals"`
	// ConnsRefused counts connections that Track could not stamp through the kernel.
	ConnsRefused uint64 `json:"conns_refused"`
	// Rings is the current number of connections with a record ring, RingsMost the maximum number,
	// and RingsRefused the number of requests without a free ring.
	Rings        uint64 `json:"rings"`
	RingsMost    uint64 `json:"rings_most"`
	RingsRefused uint64 `json:"rings_refused"`
	// RecordsLost counts records overwritten before they were read, because rings were too small or
	// readers too late.
	RecordsLost uint64 `json:"records_lost"`
	// SegmentsEarly counts segments that arrived before their connection owned a ring (the last 8
	// of a connection are kept). SegmentsEarlyLost counts the early segments for
	// which there was no place at all.
	SegmentsEarly     uint64 `json:"segments_early"`
	SegmentsEarlyLost uint64 `json:"segments_early_lost"`
	// SegmentsNoBase counts segments that came while the start of the stream was unknown.
	// ConnsNoBase counts connections whose start stayed unknown, which use the time after the read.
	SegmentsNoBase uint64 `json:"segments_no_base"`
	ConnsNoBase    uint64 `json:"conns_no_base"`
	// StampsMissing counts reads without a usable socket timestamp: no timestamp came, the wall
	// clock was set, or segments came out of order.
	StampsMissing uint64 `json:"stamps_missing"`
	// SegmentsForeign counts segments whose ring already belonged to another connection. They were
	// not recorded.
	SegmentsForeign uint64 `json:"segments_foreign"`
	// SegmentsListen counts data segments that arrived on a listening socket, before their
	// connection existed (TCP Fast Open, TCP_DEFER_ACCEPT).
	SegmentsListen uint64 `json:"segments_listen"`
}

// Now returns and counts the arrival of a message on an untracked connection, such as HTTP: the
// time after its read.
func (s *Stamper) Now() stamp.Arrival {
	s.arrivals[0].bySource[stamp.Read].Add(1)
	return stamp.Arrival{At: clock.Mono(), Source: stamp.Read}
}

// Info returns the source in use and its counters.
func (s *Stamper) Info() Info {
	in := Info{Mode: s.mode, Source: s.sourceName(), Reason: s.unbasedReason(), Kernel: s.kernel, Pinned: s.pinned}
	for i := range s.arrivals {
		for j := range s.arrivals[i].bySource {
			in.Counters.Arrivals[j] += s.arrivals[i].bySource[j].Load()
		}
	}
	in.Counters.ConnsRefused = s.refused.Load()
	if s.src != nil {
		s.src.counters(&in.Counters)
	}
	return in
}

// Close frees the Stamper's kernel resources. All connections must have been released. Released
// connections and their sockets continue without stamps.
func (s *Stamper) Close() error {
	if s.src == nil {
		return nil
	}
	return s.src.close()
}

// unbasedReason returns the known reasons for not having better stamps.
func (s *Stamper) unbasedReason() string {
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

// memlock matches the BPF library's advice to developers. Operators learn what is missing from
// docs/arrival-stamps.md and srtm doctor.
var memlock = regexp.MustCompile(` ?\(MEMLOCK may be too low[^)]*\)`)
