package agent

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

// pulse has the node hold its messages once this process has not run for half a lease. A
// process that is stopped (SIGSTOP, a paused machine) cannot see that its lease ends and that
// its id goes to another process. While the process runs, pulse moves the time from which on
// the node holds messages ahead of the clock, so that the time has passed when the process goes
// on. Messages then leave again once the adaptor has renewed the lease, which shows that the
// id is still this process'.
//
// A broker of policy Strict needs no pulse: the node ends all shares with the lease.
type pulse struct {
	// Set once.
	hold func(mono.Time)                          // Node.HoldFrom
	woke func(ctx context.Context, now mono.Time) // tells the owner
	kick chan struct{}                            // 1 deep: verified has changed

	// Atomic, written by the owner.
	length   atomic.Int64 // of the lease, a time.Duration; 0: not known yet
	verified atomic.Int64 // mono.Time at which the id was this process'
}

// verify lets messages leave again, as the id was this process' at that time.
func (p *pulse) verify(at mono.Time) {
	p.verified.Store(int64(at))
	select {
	case p.kick <- struct{}{}:
	default: // run has been told and has not looked yet
	}
}

// run works until ctx ends. It leaves the node as it is, for nothing is released after the
// agent.
func (p *pulse) run(ctx context.Context) {
	const idle = 100 * time.Millisecond
	timer := time.NewTimer(0)
	defer timer.Stop()
	until, held := mono.Never, mono.Time(0) // held: since when, 0: it is not
	for {
		select {
		case <-timer.C:
		case <-p.kick:
		case <-ctx.Done():
			p.hold(mono.Never)
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
			p.hold(until)
		default:
			held = now
			p.woke(ctx, now)
		}
	}
}
