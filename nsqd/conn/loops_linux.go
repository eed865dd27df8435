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

// loops are a server's event loops. Where there may be more or fewer of them they are
// looked at while they are at work, every lookEvery, and follow the load (spread.go);
// a server that does nothing is not looked at. The loop whose turn it is looks itself:
// waking another thread for it moves threads between processors, and on processors that
// are nearly busy that was most of the slowest deliveries.
type loops struct {
	env *env
	ctx context.Context // the server's: once it ends, there are no changes

	mu     sync.Mutex
	all    []*loop // that new connections go to
	ending *loop   // hands its connections on
	spread spreader
	last   processors // at the look before

	wg      sync.WaitGroup // of loops
	nextAt  atomic.Int64   // when a look is due; mono.Time
	ordered atomic.Bool    // a loop has yet to carry out what it was told
}

// newLoops starts minLoops loops. Until ctx ends there may be up to maxLoops.
func newLoops(ctx context.Context, e *env, minLoops, maxLoops int) (*loops, error) {
	g := &loops{env: e, ctx: ctx, spread: spreader{min: minLoops, max: maxLoops}}
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

// start adds a loop. Holds mu, or is newLoops'.
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

// take begins to serve a connection that was accepted. Any goroutine may call it.
func (g *loops) take(fd int, remote string) {
	g.mu.Lock()
	defer g.mu.Unlock() // so that no loop ends that is just being given one
	to := g.all[0]
	for _, l := range g.all {
		if l.effort.expected() < to.effort.expected() {
			to = l
		}
	}
	to.effort.seen.fresh++
	to.take(fd, remote)
}

// due looks at the loops, if it is time. A loop calls it, after a turn.
func (g *loops) due(now mono.Time) {
	at := g.nextAt.Load()
	if g.spread.max > g.spread.min && int64(now) >= at && g.nextAt.CompareAndSwap(at, int64(now.Add(lookEvery))) {
		g.look(now)
	}
}

// look has the spreader see what the loops did since the last look, and does what it
// says.
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
	if high > crowded { // else it is not asked about
		idle = g.last.since(now)
	}
	if g.ordered.Load() || g.ctx.Err() != nil {
		return
	}
	g.do(g.spread.look(loads, idle))
}

// do carries out a change. Holds mu. Requires: the one before is carried out.
func (g *loops) do(c change) {
	switch c.kind {
	case startLoop:
		if err := g.start(); err != nil {
			g.env.log.Warn("no further event loop", obs.KeyError, err, "loops", len(g.all))
			return
		}
	case moveWork:
		g.ordered.Store(true)
		g.all[c.from].inbox.tell(order{to: g.all[c.to], part: c.part})
		return
	case endLoop:
		g.ordered.Store(true)
		l := g.all[c.from]
		g.ending = l
		l.inbox.tell(order{to: g.all[c.to], ends: true})
		last := len(g.all) - 1
		g.all[c.from] = g.all[last]
		g.all[last], g.all = nil, g.all[:last]
	default:
		return
	}
	g.env.log.Info("event loops follow the load", "loops", len(g.all))
}

// done: a loop has carried out what it was told.
func (g *loops) done() { g.ordered.Store(false) }

// stop ends all loops, which have no connections any more, and waits for them.
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

// stats of the loops that there are.
func (g *loops) stats() []LoopStats {
	g.mu.Lock()
	defer g.mu.Unlock()
	stats := make([]LoopStats, len(g.all))
	for i, l := range g.all {
		stats[i] = LoopStats{Number: l.number, Busy: time.Duration(l.effort.busy.Load()), Connections: int(l.effort.connections.Load())}
	}
	return stats
}

// order is what a loop is told to do with its connections.
type order struct {
	to   *loop
	part float64 // of its work, to be given to
	ends bool    // all go, and then the loop ends
}

// workOfCall is how many bytes cost as much as the call that reads or writes them,
// within a factor of two.
const workOfCall = 2 << 10

// bulk is what a loop or a connection did: bytes read and written, and workOfCall for
// each call. It is counted by epochs, from one look to the next.
type bulk struct {
	epoch       uint32
	now, before uint32 // in this epoch, and in the one before
}

func (w *bulk) add(n int, epoch uint32) {
	w.at(epoch)
	w.now += uint32(n + workOfCall)
}

// at goes on to an epoch.
func (w *bulk) at(epoch uint32) {
	switch {
	case w.epoch == epoch:
		return
	case w.epoch+1 == epoch:
		w.before = w.now
	default:
		w.before = 0
	}
	w.epoch, w.now = epoch, 0
}

// effort is how a loop is at work. Owned by the loop, but for what is atomic, which
// others read, and epoch, which a look sets.
type effort struct {
	busy        atomic.Int64  // processor time of all turns, ns
	done        atomic.Uint64 // work of all turns
	connections atomic.Int32
	epoch       atomic.Uint32
	largest     atomic.Uint64 // math.Float64bits of the part of work that came from one connection

	work    bulk
	turn    uint32 // work of this turn
	most    uint32 // work of the connection that did most in this epoch
	turns   uint32
	cpu     time.Duration // of the thread, when a turn began that is a sample
	sampled struct{ wall, cpu time.Duration }

	seen seen // under loops.mu
}

// sampleEvery: the thread is asked for its processor time in so many turns once.
const sampleEvery = 16

// begins is called at the begin of a turn.
func (e *effort) begins() {
	if e.turns++; e.turns%sampleEvery == 1 {
		e.cpu = threadTime()
	}
}

// ends is called at the end of a turn that took so long.
func (e *effort) ends(took time.Duration) {
	s := &e.sampled
	if e.turns%sampleEvery == 1 {
		s.wall += took
		s.cpu += min(max(0, threadTime()-e.cpu), took) // a turn may have changed threads
		if s.wall > time.Second {
			s.wall, s.cpu = s.wall/2, s.cpu/2
		}
	}
	if s.wall > 0 {
		took = time.Duration(float64(took) * float64(s.cpu) / float64(s.wall))
	}
	e.busy.Store(e.busy.Load() + int64(took))
	e.done.Store(e.done.Load() + uint64(e.turn))
	e.turn = 0
	if epoch := e.epoch.Load(); epoch != e.work.epoch {
		e.work.at(epoch)
		e.largest.Store(math.Float64bits(float64(e.most) / max(1, float64(e.work.before))))
		e.most = 0
	}
}

// worked counts n bytes that were read or written for a connection.
func (e *effort) worked(s *slot, n int) {
	e.work.add(n, e.work.epoch)
	e.turn += uint32(n + workOfCall)
	s.work.add(n, e.work.epoch)
	e.most = max(e.most, s.work.now)
}

// seen is what looks know of a loop. Under loops.mu.
type seen struct {
	at    mono.Time
	done  uint64  // effort.done then
	busy  int64   // effort.busy then
	load  float64 // how busy it was before that
	fresh int     // connections it was given since
}

// look returns what the loop did since the last one. Under loops.mu.
func (e *effort) look(now mono.Time) loopLoad {
	busy, done, last := e.busy.Load(), e.done.Load(), e.seen
	load := loopLoad{connections: int(e.connections.Load()), largest: math.Float64frombits(e.largest.Load())}
	if last.at != 0 && last.at.Before(now) {
		load.busy = min(1, float64(busy-last.busy)/float64(now.Sub(last.at)))
		load.work = float64(done-last.done) / now.Sub(last.at).Seconds()
	}
	e.seen = seen{at: now, done: done, busy: busy, load: load.busy}
	e.epoch.Add(1)
	return load
}

// expected is how busy the loop is, as far as is known, with what it was given since.
// Under loops.mu.
func (e *effort) expected() float64 { return e.seen.load + float64(e.seen.fresh)/100 }

// processors tells how many of those that this process may run on have nothing to do.
type processors struct {
	at   mono.Time
	idle time.Duration // of all, since the system started
}

// since returns how many had nothing to do since the last call; -1: not known. Much
// between calls makes it a mean over much.
func (p *processors) since(now mono.Time) float64 {
	last := *p
	var mine unix.CPUSet
	fs, err := procfs.NewDefaultFS()
	if err != nil || unix.SchedGetaffinity(0, &mine) != nil {
		return -1
	}
	stat, err := fs.Stat()
	if err != nil {
		return -1
	}
	p.at, p.idle = now, 0
	// order: a sum
	for cpu, t := range stat.CPU {
		if mine.IsSet(int(cpu)) {
			p.idle += time.Duration((t.Idle + t.Iowait) * float64(time.Second))
		}
	}
	if last.at == 0 || !last.at.Before(now) || now.Sub(last.at) > 10*lookEvery {
		return -1
	}
	return float64(p.idle-last.idle) / float64(now.Sub(last.at))
}

// threadTime is the processor time of the thread that calls.
func threadTime() time.Duration {
	var t unix.Timespec
	unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_THREAD_CPUTIME_ID, uintptr(unsafe.Pointer(&t)), 0)
	return time.Duration(t.Nano())
}
