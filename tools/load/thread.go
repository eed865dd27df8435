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

// urgency is the nice value of the load's threads. The load shares the processors with the
// broker. If a thread of the load waits for a processor, the wait counts as the broker's
// latency. Therefore these threads, which mostly sleep, run first if the system permits.
const urgency = -10

// lockUrgentThread locks the goroutine to a thread with precise timers and, if permitted, priority.
// The thread ends with the goroutine.
func lockUrgentThread() error {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("timer slack: %w", err)
	}
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, urgency); err != nil && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("priority: %w", err)
	}
	return nil
}

// Procs returns GOMAXPROCS for Perform, without busy threads. Some threads sleep in system
// calls that are hidden from the scheduler: a sender or a reader of replies, and a
// subscriber per channel. Procs adds 32 for these threads.
func Procs() int { return runtime.NumCPU() + 32 }

// sleepUntil sleeps until an instant; it may return early.
func sleepUntil(at mono.Time) error {
	when := unix.NsecToTimespec(int64(at))
	_, _, errno := unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, uintptr(unsafe.Pointer(&when)), 0, 0, 0)
	if errno == unix.EINTR {
		runtime.Gosched() // the signal may mean that the runtime wants this thread
	} else if errno != 0 {
		return fmt.Errorf("sleep: %w", errno)
	}
	return nil
}

// Spin keeps the given number of goroutines busy until the caller calls stop.
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
