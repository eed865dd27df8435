package hook

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/bpf"
	"github.com/srtm-io/srtm/kernel/stamp"
)

// chunkSlots is the number of rings in a chunk: about 2 MB of kernel memory with the default ring
// size.
const chunkSlots = 1024

// earlyEntries is the number of connections without a ring that the kernel remembers. New
// connections replace the least recently used.
const earlyEntries = 4096

// filter is the source of the eBPF program's stamps.
type filter struct {
	// set once
	prog          *ebpf.Program
	conns         *ebpf.Map // socket cookie to slot
	early         *ebpf.Map // socket cookie to earlyValue
	counts        *ebpf.Map
	chunks        *ebpf.Map // chunk number to chunk; nil if another process filled it
	lock          *os.File  // of the pin directory; nil without
	unbased       bool      // the program does not determine base
	unbasedReason string    // why unbased is set
	shift         mono.Time
	slots         slots
	baseline      [counterCount]uint64

	// atomic: written by readers, for display
	lostRecords atomic.Uint64
	noBase      atomic.Uint64
}

// The program's counters, in its order.
const (
	countEarly = iota
	countEarlyLost
	countNoBase
	countForeign
	countListen
	counterCount
)

// earlyValue is the kernel's memory of a connection without a slot. kernel/stamp describes its
// layout.
type earlyValue struct {
	Base, BaseSet, Head, Top uint32
	Ring                     [stamp.EarlyRecords]struct{ Time, Meta uint64 }
}

// openFilter opens the pinned program, or loads the program, and tests it.
func openFilter(cfg Config) (source, error) {
	var f *filter
	var err error
	if cfg.PinDir != "" {
		f, err = openPinned(cfg.PinDir)
	} else {
		f, err = load(cfg, chunkSlots, false)
		if err != nil {
			// The kernel has no type information, or the process has only CAP_BPF.
			reason := err
			if f, err = load(cfg, chunkSlots, true); err != nil {
				return nil, errors.Join(reason, err)
			}
			f.unbasedReason = oneLine(reason)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := f.tryOut(); err != nil {
		return nil, errors.Join(fmt.Errorf("self-test: %w", err), f.close())
	}
	return f, nil
}

// load loads the program, its maps and the first chunk into the kernel.
func load(cfg Config, perChunk uint32, unbased bool) (_ *filter, err error) {
	spec, err := bpf.LoadArrival()
	if err != nil {
		return nil, fmt.Errorf("read the embedded program: %w", err)
	}
	use, otherProgram := "arrival", "arrival_plain"
	if unbased {
		use, otherProgram = otherProgram, use
	}
	delete(spec.Programs, otherProgram)

	f := &filter{unbased: unbased}
	f.slots.records = cfg.RingRecords
	f.slots.limit = uint32(cfg.MaxConns)
	f.slots.window = windowSlots()
	f.slots.chunk = max(perChunk, f.slots.window)
	inner := spec.Maps["chunks"].InnerMap
	inner.ValueSize = uint32(slotSize(cfg.RingRecords))
	inner.MaxEntries = f.slots.chunk
	spec.Maps["chunks"].MaxEntries = (f.slots.limit + f.slots.chunk - 1) / f.slots.chunk
	spec.Maps["conns"].MaxEntries = f.slots.limit
	spec.Maps["early"].MaxEntries = earlyEntries
	bits := uint32(0)
	for 1<<bits < f.slots.chunk {
		bits++
	}
	var offsets [2]uint32
	if !unbased {
		if offsets, err = tcpSock(); err != nil {
			return nil, err
		}
	}
	err = errors.Join(
		spec.Variables["ring_mask"].Set(uint32(cfg.RingRecords-1)),
		spec.Variables["chunk_bits"].Set(bits),
		spec.Variables["rcv_nxt_at"].Set(offsets[0]),
		spec.Variables["bytes_received_at"].Set(offsets[1]),
	)
	if err != nil {
		return nil, fmt.Errorf("size the program: %w", err)
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		return nil, fmt.Errorf("load the program: %w", err)
	}
	defer coll.Close() // detached objects stay open
	f.prog = coll.DetachProgram(use)
	f.conns = coll.DetachMap("conns")
	f.early = coll.DetachMap("early")
	f.counts = coll.DetachMap("counters")
	f.chunks = coll.DetachMap("chunks")
	f.slots.makeChunk = func(number uint32) (*ebpf.Map, error) {
		m, err := ebpf.NewMap(inner)
		if err != nil {
			return nil, fmt.Errorf("make record rings: %w", err)
		}
		if err := f.chunks.Put(number, m); err != nil {
			return nil, errors.Join(fmt.Errorf("install record rings: %w", err), m.Close())
		}
		return m, nil
	}
	first, err := f.slots.makeChunk(0)
	if err != nil {
		return nil, errors.Join(err, f.close())
	}
	f.slots.add(first)
	return f, nil
}

func (f *filter) name() string { return string(EBPF) }

func (f *filter) note() string {
	var notes []string
	if f.unbased {
		notes = append(notes, "stream starts are worked out in user space")
	}
	if f.unbasedReason != "" {
		notes = append(notes, f.unbasedReason)
	}
	f.slots.mu.Lock()
	failure := f.slots.mu.failure
	f.slots.mu.Unlock()
	if failure != nil {
		notes = append(notes, oneLine(failure))
	}
	return strings.Join(notes, ": ")
}

func (f *filter) close() error {
	errs := []error{f.slots.close(), f.prog.Close(), f.conns.Close(), f.early.Close(), f.counts.Close()}
	if f.chunks != nil {
		errs = append(errs, f.chunks.Close())
	}
	if f.lock != nil {
		errs = append(errs, f.lock.Close())
	}
	return errors.Join(errs...)
}

func (f *filter) control(c syscall.RawConn) error {
	// An urgent byte has a sequence number, so it must also be part of the stream that is read.
	if err := setsockopt(c, unix.SO_OOBINLINE, 1); err != nil {
		return err
	}
	return setsockopt(c, unix.SO_ATTACH_BPF, f.prog.FD())
}

func setsockopt(c syscall.RawConn, option, value int) error {
	var inner error
	if err := c.Control(func(fd uintptr) { inner = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, option, value) }); err != nil {
		return err
	}
	return inner
}

func (f *filter) counters(c *Counters) {
	sum := f.total()
	c.SegmentsEarly = sum[countEarly] - f.baseline[countEarly]
	c.SegmentsEarlyLost = sum[countEarlyLost] - f.baseline[countEarlyLost]
	c.SegmentsNoBase = sum[countNoBase] - f.baseline[countNoBase]
	c.SegmentsForeign = sum[countForeign] - f.baseline[countForeign]
	c.SegmentsListen = sum[countListen] - f.baseline[countListen]
	c.RecordsLost = f.lostRecords.Load()
	c.ConnsNoBase = f.noBase.Load()
	f.slots.mu.Lock()
	defer f.slots.mu.Unlock()
	c.Rings = uint64(f.slots.mu.taken)
	c.RingsMost = uint64(f.slots.limit)
	c.RingsRefused = f.slots.mu.refused
}

// total returns the program's counters, summed over CPUs. A counter that cannot be read counts as 0,
// because counters are for display only.
func (f *filter) total() (sum [counterCount]uint64) {
	for i := range sum {
		var perCPU []uint64
		if f.counts.Lookup(uint32(i), &perCPU) == nil {
			for _, n := range perCPU {
				sum[i] += n
			}
		}
	}
	return sum
}

func (f *filter) track(l readable, rc syscall.RawConn) (tracker, error) {
	return &filterConn{f: f, conn: l, rc: rc}, nil
}

// filterConn stamps one connection. It claims a ring only when the first stamp is requested, so
// idle connections and subscribers cost nothing. The kernel's early records cover earlier segments.
type filterConn struct {
	// set once
	f *filter

	// owned by the reader
	conn  readable
	rc    syscall.RawConn
	claim *claim // nil until the first stamp is requested
	// pause is the number of messages for which no ring is requested.
	pause int
}

// claim is a connection's ring.
type claim struct {
	// set once
	slot   uint32
	cookie uint64

	// owned by the reader
	ring        ring
	mapper      stamp.Mapper
	countedLost uint64 // the part of mapper.Lost that is already counted
	// started means that base is known. agreed means that the program reported the same base twice.
	// The program reads two related numbers of the socket without the socket's lock, so a peer
	// might make it read inconsistent numbers. tries is the number of remaining attempts to work
	// out base.
	started bool
	agreed  bool
	base    uint32
	tries   int
}

const (
	// refusalPause is the number of messages between two searches for a ring while all rings are
	// taken.
	refusalPause = 64
	// baseTries is the number of messages after which a connection without a base uses the time
	// after the read.
	baseTries = 64
)

func (c *filterConn) read(p []byte, _ int64) (int, error) { return c.conn.Read(p) }

func (c *filterConn) move(l readable, rc syscall.RawConn) { c.conn, c.rc = l, rc }

func (c *filterConn) arrival(start, end int64, _ mono.Time) (stamp.Arrival, bool) {
	cl := c.claim
	if cl == nil {
		if c.pause > 0 {
			c.pause--
			return stamp.Arrival{}, false
		}
		var err error
		if cl, err = c.f.claim(c.rc); err != nil {
			if err != errSlotSoon {
				c.pause = refusalPause
			}
			return stamp.Arrival{}, false
		}
		c.claim = cl
	}
	if !cl.started && !c.f.begin(cl, c.rc, start) {
		if cl.tries--; cl.tries == 0 {
			c.giveUp()
		}
		return stamp.Arrival{}, false
	}
	if !cl.agreed {
		if base, ok := cl.ring.base(); ok && base != cl.base {
			c.giveUp()
			return stamp.Arrival{}, false
		} else if ok {
			cl.agreed = true
		}
	}
	a, ok := cl.mapper.Arrival(&cl.ring, start, end)
	if lost := cl.mapper.Lost(); lost != cl.countedLost {
		c.f.lostRecords.Add(lost - cl.countedLost)
		cl.countedLost = lost
	}
	return a, ok
}

// giveUp makes the connection use the time after the read.
func (c *filterConn) giveUp() {
	c.f.noBase.Add(1)
	c.release()
	c.pause = math.MaxInt
}

func (c *filterConn) ignore() error { return setsockopt(c.rc, unix.SO_DETACH_BPF, 0) }

func (c *filterConn) release() {
	if c.claim != nil {
		c.f.release(c.claim)
		c.claim = nil
	}
}

// claim gives the connection a ring. Its newer records are then in the ring, its older records in
// early. Errors: from slots.acquire, and from the kernel.
func (f *filter) claim(rc syscall.RawConn) (*claim, error) {
	var cookie uint64
	var inner error
	err := rc.Control(func(fd uintptr) { cookie, inner = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE) })
	if err != nil {
		return nil, err
	}
	if inner != nil {
		return nil, inner
	}
	slot, mem, err := f.slots.acquire(clock.Mono())
	if err != nil {
		return nil, err
	}
	cl := &claim{slot: slot, cookie: cookie, ring: newRing(mem, f.shift), tries: baseTries}
	cl.ring.reset(cookie)
	if err := f.conns.Put(cookie, slot); err != nil {
		cl.ring.disown()
		f.slots.release(slot, clock.Mono())
		return nil, err
	}
	return cl, nil
}

func (f *filter) release(cl *claim) {
	// early is a cache and a claim is released once, so the only possible error is a missing entry.
	_ = f.conns.Delete(cl.cookie)
	_ = f.early.Delete(cl.cookie)
	cl.ring.disown()
	f.slots.release(cl.slot, clock.Mono())
}

// begin determines the sequence number at which the stream starts and the records before the ring.
// It returns false if the start is unknown.
func (f *filter) begin(cl *claim, rc syscall.RawConn, now int64) bool {
	v, found := f.loadEarly(cl.cookie)
	records, all := v.records(f.shift)
	base, ok := v.Base, found && v.BaseSet != 0
	if f.unbased {
		base, ok = cl.deriveBase(records, v.Base, rc)
		ok = ok && found && all
	} else if !ok {
		base, ok = cl.ring.base()
	}
	if !ok {
		return false
	}
	cl.mapper.Begin(base, records, !found || !all, now)
	cl.base, cl.started = base, true
	return true
}

// loadEarly reads the early records. The program may write while the kernel copies them, so
// loadEarly reads until two copies are equal.
func (f *filter) loadEarly(cookie uint64) (v earlyValue, found bool) {
	if f.early.Lookup(cookie, &v) != nil {
		return earlyValue{}, false
	}
	for {
		var again earlyValue
		if f.early.Lookup(cookie, &again) != nil {
			return earlyValue{}, false
		}
		if again == v {
			return v, true
		}
		v = again
	}
}

// records returns the remaining records, oldest first, and whether they are all records.
func (v *earlyValue) records(shift mono.Time) (rs []stamp.Record, all bool) {
	first := uint32(0)
	if v.Head > stamp.EarlyRecords {
		first = v.Head - stamp.EarlyRecords
	}
	for i := first; i != v.Head; i++ {
		r := v.Ring[i%stamp.EarlyRecords]
		if m := stamp.Meta(r.Meta); m.Of(uint64(i)) {
			rs = append(rs, stamp.MakeRecord(mono.Time(r.Time)+shift, m))
		}
	}
	return rs, int(v.Head) == len(rs)
}

// deriveBase returns the sequence number of stream offset 0, if the early records and the ring's
// records cover all segments of the connection. segments is the number of early segments.
//
// The records are complete if TCP has counted the same number of segments. (No filter sees a
// segment that completed the handshake.) So the segments that TCP accepted are among the records,
// and TCP knows how many bytes it received in order. If the records span exactly that many bytes,
// their start is the start of the stream. They span more bytes if a segment is missing or being
// received, or if TCP dropped segments of the peer.
func (cl *claim) deriveBase(early []stamp.Record, segments uint32, rc syscall.RawConn) (base uint32, ok bool) {
	info, err := tcpInfo(rc)
	head := cl.ring.Head()
	inRing, _ := cl.ring.base()
	if err != nil || head > cl.ring.Size() || segments+inRing != info.Data_segs_in {
		return 0, false
	}
	for i := range head {
		r, ok := cl.ring.Record(i)
		if !ok {
			return 0, false
		}
		early = append(early, r)
	}
	if len(early) == 0 {
		return 0, false
	}
	// Use distances from one record. The peer chooses sequence numbers, so a search for ever
	// earlier or later numbers could wrap around.
	middle := early[0].Seq
	var from, to int64
	for _, r := range early {
		off := int64(int32(r.Seq - middle))
		from, to = min(from, off), max(to, off+int64(r.Size))
	}
	return middle + uint32(from), uint64(to-from) == info.Bytes_received
}

func tcpInfo(rc syscall.RawConn) (info *unix.TCPInfo, err error) {
	var inner error
	err = rc.Control(func(fd uintptr) {
		info, inner = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	return info, errors.Join(err, inner)
}
