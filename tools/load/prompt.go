//go:build linux

package load

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/mono"
)

// The load shares the processors with the broker that it measures. Its threads
// sleep nearly all the time, and what one of them waits for a processor would
// count as the broker's latency; so they go first, if the system lets them.
const urgency = -10

// prompt makes the goroutine's thread its own, with precise timers and, where
// that is permitted, priority. The thread ends with the goroutine.
func prompt() error {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("timer slack: %w", err)
	}
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, urgency); err != nil && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("priority: %w", err)
	}
	return nil
}

// Procs is what GOMAXPROCS has to be for Perform, besides one for each busy thread:
// as many threads as sleep in system calls that the scheduler is not told of (a
// sender or a reader of answers, and a subscriber for each channel), and some.
func Procs() int { return runtime.NumCPU() + 32 }

// sleepUntil returns at an instant, or before.
func sleepUntil(at mono.Time) error {
	when := unix.NsecToTimespec(int64(at))
	_, _, errno := unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, uintptr(unsafe.Pointer(&when)), 0, 0, 0)
	if errno == unix.EINTR {
		runtime.Gosched() // it may be the runtime that wants this thread
	} else if errno != 0 {
		return fmt.Errorf("sleep: %w", errno)
	}
	return nil
}

// Spin keeps so many goroutines busy until the result is called.
func Spin(threads int) (stop func()) {
	var stopped atomic.Bool
	var all sync.WaitGroup
	for range threads {
		all.Go(func() {
			x := uint64(1)
			for !stopped.Load() {
				for range 1000 {
					x = x*6364136223846793005 + 1442695040888963407
				}
			}
			runtime.KeepAlive(x)
		})
	}
	return func() {
		stopped.Store(true)
		all.Wait()
	}
}
