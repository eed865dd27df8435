package agent

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

// pulse makes the node hold its messages if this process has not run for half a lease. A process that
// is stopped (SIGSTOP, a paused machine) cannot see that its lease ends and that its id goes to another
// process. While the process runs, pulse keeps the node's hold time ahead of the clock. When a stopped
// process resumes, the hold time has passed. Messages leave again after the adaptor has renewed the
// lease, which proves that the id still belongs to this process.
//
// A broker of policy Strict needs no pulse: the node ends all shares with the lease.
type pulse struct {
	// Set once.
	holdFrom func(mono.Time)                          // Node.HoldFrom
	woke     func(ctx context.Context, now mono.Time) // notifies the owner
	kick     chan struct{}                            // capacity 1; verified has changed

	// Atomic, written by the owner.
	length   atomic.Int64 // length of the lease, a time.Duration; 0: unknown
	verified atomic.Int64 // mono.Time at which the id belonged to this process
}

// verify lets messages leave again: the id belonged to this process at the given time.
func (p *pulse) verify(at mono.Time) {
	p.verified.Store(int64(at))
	select {
	case p.kick <- struct{}{}:
	default: // run has not read the previous kick yet
	}
}

// run works until ctx ends. At the end run removes the hold.
func (p *pulse) run(ctx context.Context) {
	const idle = 100 * time.Millisecond
	timer := time.NewTimer(0)
	defer timer.Stop()
	until, held := mono.Never, mono.Time(0) // held: start of the hold; 0: no hold
	for {
		select {
		case <-timer.C:
		case <-p.kick:
		case <-ctx.Done():
			p.holdFrom(mono.Never)
			return
		}
		now, half := clock.Mono(), time.Duration(p.length.Load())/2
		timer.Reset(max(half/4, time.Millisecond))
		if half == 0 {
			timer.Reset(idle)
			continue
		}
		if verified := mono.Time(p.verified.Load()); held != 0 && verified >= held {
			held, until = 0, verified.Add(half)
		}
		switch {
		case held != 0:
		case now.Before(until):
			until = now.Add(half)
			p.holdFrom(until)
		default:
			held = now
			p.woke(ctx, now)
		}
	}
}
