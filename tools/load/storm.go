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

// stormAt opens rate connections a second until the caller calls the returned function.
// Each connection performs the handshake and is closed by a reset. After a delay, stormAt
// opens connections faster until it has caught up with the schedule. The returned function
// returns the number of connections.
func stormAt(address string, rate float64, d Dialect) func() (int, error) {
	var stopped atomic.Bool
	var storm sync.WaitGroup
	var opened int
	var failed error
	storm.Go(func() {
		// Without priority: the storm would take too much time from the measured load.
		runtime.LockOSThread()
		every := time.Duration(1e9 / rate)
		for due := clock.Mono(); !stopped.Load(); due = due.Add(every) {
			for now := clock.Mono(); now.Before(due) && !stopped.Load(); now = clock.Mono() {
				if failed = sleepUntil(max(due, now.Add(nap))); failed != nil {
					return
				}
			}
			if failed = openAndReset(address, opened, d); failed != nil {
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

// openAndReset opens a connection, performs the handshake and closes the connection by a reset.
func openAndReset(address string, n int, d Dialect) error {
	c, raw, err := dial(address, false, d)
	if err != nil {
		return fmt.Errorf("connection %d of the storm: %w", n, err)
	}
	// A reset leaves no local port in TIME_WAIT; there are only 28,000 ports.
	return errors.Join(d.hello(c, "storm"), unix.SetsockoptLinger(raw.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}), raw.Close())
}
