//go:build linux

package load

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/clock"
)

// stormAt opens so many connections a second, each of which greets and is closed by a
// reset, until the function that it returns is called. That one says how many there were.
// What is late is caught up with.
func stormAt(address string, rate float64, d Dialect) func() (int, error) {
	var stopped atomic.Bool
	var storm sync.WaitGroup
	var opened int
	var failed error
	storm.Go(func() {
		// Without the priority of what is measured, of which it would take too much.
		runtime.LockOSThread()
		every := time.Duration(1e9 / rate)
		for due := clock.Mono(); !stopped.Load(); due = due.Add(every) {
			for now := clock.Mono(); now.Before(due) && !stopped.Load(); now = clock.Mono() {
				if failed = sleepUntil(max(due, now.Add(nap))); failed != nil {
					return
				}
			}
			if failed = passBy(address, opened, d); failed != nil {
				return
			}
			opened++
		}
	})
	return func() (int, error) {
		stopped.Store(true)
		storm.Wait()
		return opened, failed
	}
}

// passBy opens a connection, greets and goes.
func passBy(address string, n int, d Dialect) error {
	c, raw, err := dial(address, false, d)
	if err != nil {
		return fmt.Errorf("connection %d of the storm: %w", n, err)
	}
	// A reset leaves no port waiting: there are 28,000.
	return errors.Join(d.hello(c, "storm"), unix.SetsockoptLinger(raw.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}), raw.Close())
}
