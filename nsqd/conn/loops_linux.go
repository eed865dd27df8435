package conn

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
)

// loops are a server's event loops. If their number may vary, it follows the load (spread.go). A
// look measures the loops every lookInterval, while there is load. The loop that notices first
// performs the look itself. To wake another thread for the look would move threads between
// processors; on busy processors such moves caused most of the slowest deliveries.
type loops struct {
	env *env
	ctx context.Context // of the server; after its end the loops do not change

	mu         sync.Mutex
	all        []*loop // loops that accept new connections
	ending     *loop   // the loop that hands its connections over
	spreader   spreader
	processors processors // at the previous look

	wg           sync.WaitGroup // of loops
	nextAt       atomic.Int64   // time of the next look, as mono.Time
	orderPending atomic.Bool    // a loop has yet to carry out an order
}

// newLoops starts minLoops loops. Until ctx ends, there may be up to maxLoops.
func newLoops(ctx context.Context, e *env, minLoops, maxLoops int) (*loops, error) {
	g := &loops{env: e, ctx: ctx, spreader: spreader{min: minLoops, max: maxLoops}}
	for range minLoops {
		if err := g.start(); err != nil {
			for _, l := range g.all {
				l.inbox.end()
			}
			return nil, err
		}
	}
	return g, nil
}

// start adds a loop. Requires: mu held, or called by newLoops.
func (g *loops) start() error {
	number := 0
	for slices.ContainsFunc(g.all, func(l *loop) bool { return l.number == number }) {
		number++
	}
	l, err := newLoop(g, number)
	if err != nil {
		return fmt.Errorf("event loop: %w", err)
	}
	g.all = append(g.all, l)
	g.wg.Go(l.run)
	return nil
}

// serve starts to serve an accepted connection. Any goroutine may call it.
func (g *loops) serve(fd int, remote string, p Protocol) {
	g.mu.Lock()
	defer g.mu.Unlock() // keeps the chosen loop from ending meanwhile
	idlest := g.all[0]
	for _, l := range g.all {
		if l.effort.expected() < idlest.effort.expected() {
			idlest = l
		}
	}
	idlest.effort.lastLook.newConnections++
	idlest.serve(fd, remote, p)
}

// lookIfDue performs a look, if the time has come. A loop calls lookIfDue after each turn.
func (g *loops) lookIfDue(now mono.Time) {
	next := g.nextAt.Load()
	if g.spreader.max > g.spreader.min && int64(now) >= next && g.nextAt.CompareAndSwap(next, int64(now.Add(lookInterval))) {
		g.look(now)
	}
}

// look measures the loops' work since the previous look and carries out the spreader's decision.
func (g *loops) look(now mono.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	loads := make([]loopLoad, len(g.all))
	high := 0.
	for i, l := range g.all {
		loads[i] = l.effort.look(now)
		high = max(high, loads[i].busy)
	}
	idle := -1.
	if high > crowded { // otherwise the spreader does not need idle
		idle = g.processors.meanIdle(now)
	}
	if g.orderPending.Load() || g.ctx.Err() != nil {
		return
	}
	g.apply(g.spreader.look(loads, idle))
}

// apply carries out a change. Requires: mu held; the previous change is complete.
func (g *loops) apply(c change) {
	switch c.kind {
	case startLoop:
		if err := g.start(); err != nil {
			g.env.log.Warn("cannot start another event loop", obs.KeyError, err, "loops", len(g.all))
			return
		}
	case moveWork:
		g.orderPending.Store(true)
		g.all[c.from].inbox.setOrder(order{to: g.all[c.to], share: c.share})
		return
	case endLoop:
		g.orderPending.Store(true)
		l := g.all[c.from]
		g.ending = l
		l.inbox.setOrder(order{to: g.all[c.to], final: true})
		last := len(g.all) - 1
		g.all[c.from] = g.all[last]
		g.all[last], g.all = nil, g.all[:last]
	default:
		return
	}
	g.env.log.Info("event loops follow the load", "loops", len(g.all))
}

// orderDone records that a loop has carried out its order.
func (g *loops) orderDone() { g.orderPending.Store(false) }

// stop ends all loops and waits for them. Requires: no loop has a connection.
func (g *loops) stop() {
	g.mu.Lock()
	for _, l := range g.all {
		l.inbox.end()
	}
	if g.ending != nil {
		g.ending.inbox.end()
	}
	g.mu.Unlock()
	g.wg.Wait()
}

// stats returns the counters of the current loops.
func (g *loops) stats() []LoopStats {
	g.mu.Lock()
	defer g.mu.Unlock()
	stats := make([]LoopStats, len(g.all))
	for i, l := range g.all {
		stats[i] = LoopStats{Number: l.number, Busy: time.Duration(l.effort.busy.Load()), Connections: int(l.effort.connections.Load())}
	}
	return stats
}

// order instructs a loop how to move its connections.
type order struct {
	to    *loop
	share float64 // share of the loop's work to move, 0 to 1
	final bool    // move all connections, then end the loop
}

// workOfCall is the number of bytes whose read or write costs as much as the system call itself,
// within a factor of two.
const workOfCall = 2 << 10

// workCount is the work of a loop or a connection: the bytes read and written, plus workOfCall for each
// call. An epoch lasts from one look to the next.
type workCount struct {
	epoch             uint32
	current, previous uint32 // work of this epoch and of the previous epoch
}

func (w *workCount) add(n int, epoch uint32) {
	w.advance(epoch)
	w.current += uint32(n + workOfCall)
}

// advance advances w to an epoch.
func (w *workCount) advance(epoch uint32) {
	switch {
	case w.epoch == epoch:
		return
	case w.epoch+1 == epoch:
		w.previous = w.current
	default:
		w.previous = 0
	}
	w.epoch, w.current = epoch, 0
}

// effort measures a loop's work. Owned by the loop. Other goroutines read the atomic fields. A look
// sets epoch.
type effort struct {
	busy        atomic.Int64  // processor time of all turns in ns
	totalWork   atomic.Uint64 // work of all turns
	connections atomic.Int32
	epoch       atomic.Uint32
	largest     atomic.Uint64 // math.Float64bits of the largest share of work of one connection

	work        workCount
	turn        uint32 // work of this turn
	largestWork uint32 // largest work of a connection in this epoch
	turns       uint32
	cpu         time.Duration // thread time at the beginning of a sampled turn
	sampled     struct{ wall, cpu time.Duration }

	lastLook lookState // guarded by loops.mu
}

// sampleEvery is the number of turns for each measurement of the thread's processor time.
const sampleEvery = 16

// beginTurn is called at the beginning of a turn.
func (e *effort) beginTurn() {
	if e.turns++; e.turns%sampleEvery == 1 {
		e.cpu = threadTime()
	}
}

// endTurn is called at the end of a turn, with the turn's duration.
func (e *effort) endTurn(elapsed time.Duration) {
	s := &e.sampled
	if e.turns%sampleEvery == 1 {
		s.wall += elapsed
		s.cpu += min(max(0, threadTime()-e.cpu), elapsed) // the goroutine may have changed threads
		if s.wall > time.Second {
			s.wall, s.cpu = s.wall/2, s.cpu/2
		}
	}
	if s.wall > 0 {
		elapsed = time.Duration(float64(elapsed) * float64(s.cpu) / float64(s.wall))
	}
	e.busy.Store(e.busy.Load() + int64(elapsed))
	e.totalWork.Store(e.totalWork.Load() + uint64(e.turn))
	e.turn = 0
	if epoch := e.epoch.Load(); epoch != e.work.epoch {
		e.work.advance(epoch)
		e.largest.Store(math.Float64bits(float64(e.largestWork) / max(1, float64(e.work.previous))))
		e.largestWork = 0
	}
}

// addWork adds a read or write of n bytes for a connection.
func (e *effort) addWork(s *slot, n int) {
	e.work.add(n, e.work.epoch)
	e.turn += uint32(n + workOfCall)
	s.work.add(n, e.work.epoch)
	e.largestWork = max(e.largestWork, s.work.current)
}

// lookState is a loop's state at the previous look. Guarded by loops.mu.
type lookState struct {
	time           mono.Time
	totalWork      uint64  // effort.totalWork at the look
	busy           int64   // effort.busy at the look
	load           float64 // utilization before the look, 0 to 1
	newConnections int     // connections assigned since the look
}

// look returns the loop's work since the previous look. Requires: loops.mu held.
func (e *effort) look(now mono.Time) loopLoad {
	busy, done, last := e.busy.Load(), e.totalWork.Load(), e.lastLook
	load := loopLoad{connections: int(e.connections.Load()), largest: math.Float64frombits(e.largest.Load())}
	if last.time != 0 && last.time.Before(now) {
		load.busy = min(1, float64(busy-last.busy)/float64(now.Sub(last.time)))
		load.work = float64(done-last.totalWork) / now.Sub(last.time).Seconds()
	}
	e.lastLook = lookState{time: now, totalWork: done, busy: busy, load: load.busy}
	e.epoch.Add(1)
	return load
}

// expected estimates the loop's utilization, with 0.01 for each connection assigned since the look.
// Requires: loops.mu held.
func (e *effort) expected() float64 { return e.lastLook.load + float64(e.lastLook.newConnections)/100 }

// processors measures how many of the processors that this process may use are idle.
type processors struct {
	time mono.Time
	idle time.Duration // idle time of all processors since the system started
}

// meanIdle returns the mean number of idle processors since the previous call, or -1 if unknown.
func (p *processors) meanIdle(now mono.Time) float64 {
	last := *p
	var affinity unix.CPUSet
	fs, err := procfs.NewDefaultFS()
	if err != nil || unix.SchedGetaffinity(0, &affinity) != nil {
		return -1
	}
	stat, err := fs.Stat()
	if err != nil {
		return -1
	}
	p.time, p.idle = now, 0
	// order: a sum
	for cpu, t := range stat.CPU {
		if affinity.IsSet(int(cpu)) {
			p.idle += time.Duration((t.Idle + t.Iowait) * float64(time.Second))
		}
	}
	if last.time == 0 || !last.time.Before(now) || now.Sub(last.time) > 10*lookInterval {
		return -1
	}
	return float64(p.idle-last.idle) / float64(now.Sub(last.time))
}

// threadTime returns the calling thread's processor time.
func threadTime() time.Duration {
	var t unix.Timespec
	unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_THREAD_CPUTIME_ID, uintptr(unsafe.Pointer(&t)), 0)
	return time.Duration(t.Nano())
}
