package broker

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// alarm calls fire at the earliest time that was set. The goroutine starts with the first
// time, so a topic that never waits needs no goroutine.
//
// An alarm may fire early or needlessly, but never later than its timer permits. Therefore
// noLater only moves the time forward: an early check is cheap, but a forgotten time would
// leave a message in the topic.
type alarm struct {
	// Set once.
	now      func() mono.Time
	newTimer func() (timer, error)
	fire     func(mono.Time)
	wg       *sync.WaitGroup

	// armed is the time set. Written under mu. noLater reads armed without mu to see that
	// there is nothing to do. A stale read is safe: before fire has run, the value can only
	// be too early, and fire sets the time again.
	armed atomic.Int64

	mu struct {
		sync.Mutex
		timer  timer // nil until first used
		closed bool
	}
}

// timer waits for a time that another goroutine may change. The caller of set and close
// holds alarm.mu, and never calls set after close. wait runs concurrently.
type timer interface {
	// set replaces the time.
	set(at, now mono.Time)
	// wait returns true at the time set, and false after close.
	wait() bool
	close()
}

func newAlarm(wg *sync.WaitGroup, now func() mono.Time, newTimer func() (timer, error), fire func(mono.Time)) *alarm {
	a := &alarm{now: now, newTimer: newTimer, fire: fire, wg: wg}
	a.armed.Store(int64(mono.Never))
	return a
}

// noLater makes the alarm fire at the given time or earlier.
func (a *alarm) noLater(at mono.Time) {
	if int64(at) >= a.armed.Load() {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed || int64(at) >= a.armed.Load() {
		return
	}
	a.armed.Store(int64(at))
	if a.mu.timer == nil {
		t, err := a.newTimer()
		if err != nil { // out of descriptors: a coarse timer is less precise
			t, _ = newCoarseTimer()
		}
		a.mu.timer = t
		a.wg.Go(func() { a.run(t) })
	}
	a.mu.timer.set(at, a.now())
}

func (a *alarm) run(t timer) {
	for t.wait() {
		a.mu.Lock()
		a.armed.Store(int64(mono.Never))
		a.mu.Unlock()
		a.fire(a.now())
	}
}

// close stops the alarm. The goroutine ends soon after.
func (a *alarm) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return
	}
	a.mu.closed = true
	if a.mu.timer != nil {
		a.mu.timer.close()
	}
}

// coarseTimer is Go's timer. It needs no descriptor, and is about a millisecond late when
// the process is idle (golang/go#44343).
type coarseTimer struct {
	t    *time.Timer
	done chan struct{}
}

func newCoarseTimer() (timer, error) {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &coarseTimer{t: t, done: make(chan struct{})}, nil
}

func (c *coarseTimer) set(at, now mono.Time) { c.t.Reset(max(0, at.Sub(now))) }

func (c *coarseTimer) wait() bool {
	select {
	case <-c.t.C:
		return true
	case <-c.done:
		return false
	}
}

func (c *coarseTimer) close() {
	c.t.Stop()
	close(c.done)
}
