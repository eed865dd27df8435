package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
)

// Exit codes of a daemon.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
)

// StopLimit bounds the time from the first signal until the daemon has stopped, unless a
// Hold extends it.
const StopLimit = 30 * time.Second

// FlushLimit bounds the time for the last log lines.
const FlushLimit = 500 * time.Millisecond

type heldKey struct{}

// Hold prevents StopLimit from ending the daemon until release is called. It protects
// work that must finish, such as writing data that would be lost. ctx is the context of
// Main's run function, or derived from it; with any other context Hold does nothing.
func Hold(ctx context.Context) (release func()) {
	holds, _ := ctx.Value(heldKey{}).(*atomic.Int32)
	if holds == nil {
		return func() {}
	}
	holds.Add(1)
	return sync.OnceFunc(func() { holds.Add(-1) })
}

// KeepPipes makes writes to a standard output without a reader fail with EPIPE instead of
// ending the process, until restore is called.
func KeepPipes() (restore func()) {
	signal.Ignore(syscall.SIGPIPE)
	return func() { signal.Reset(syscall.SIGPIPE) }
}

// Survive keeps the process running when its terminal closes (SIGHUP), and when the
// reader of its standard error or output ends (SIGPIPE). A write to the lost reader fails
// with EPIPE. A supervisor takes both signals for a clean exit and would not restart the
// process.
func Survive() {
	signal.Ignore(syscall.SIGHUP)
	KeepPipes()
}

// OnHangup calls reload at each SIGHUP, on one goroutine, until stop is called. Signals
// during a call cause one more call. stop waits for the goroutine. Afterwards the process
// ignores SIGHUP.
func OnHangup(reload func()) (stop func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP)
	stopped := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-signals:
				reload()
			case <-stopped:
				return
			}
		}
	})
	return sync.OnceFunc(func() {
		signal.Ignore(syscall.SIGHUP)
		close(stopped)
		wg.Wait()
	})
}

// Main runs a daemon and returns its exit code, for os.Exit:
//
//	func main() { os.Exit(lifecycle.Main("nsqd", run)) }
//
// The context ends at the first SIGINT or SIGTERM. The second signal kills the process at
// once. The end of StopLimit kills it with exit code 1. If the daemon holds (see Hold),
// the kill waits for the first whole multiple of StopLimit without a hold. PrintError
// prints an error of run to standard error. The code is 0 without an error, 2 for a
// UsageError, the code of an ExitError, and otherwise 1. Main waits at most FlushLimit
// for unread lines on obs.Stderr.
func Main(name string, run func(context.Context) error) int {
	ctx, restore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer restore()
	// With the default handlers restored, the next signal is fatal.
	context.AfterFunc(ctx, restore)
	code := supervise(ctx, name, run, obs.Stderr, func(code int) {
		obs.Stderr.Flush(FlushLimit)
		os.Exit(code)
	})
	obs.Stderr.Flush(FlushLimit)
	return code
}

// supervise is Main without the signals. It calls exit only if run outlives StopLimit.
func supervise(ctx context.Context, name string, run func(context.Context) error, stderr io.Writer, exit func(int)) int {
	ended := make(chan struct{})
	watched := make(chan struct{})
	var holds atomic.Int32
	go func() {
		defer close(watched)
		select {
		case <-ended:
			return
		case <-ctx.Done():
		}
		limit := time.NewTicker(StopLimit)
		defer limit.Stop()
		for elapsed := StopLimit; ; elapsed += StopLimit {
			select {
			case <-ended:
				return
			case <-limit.C:
			}
			if holds.Load() == 0 {
				fmt.Fprintf(stderr, "%s: not stopped %v after the signal; giving up\n", name, elapsed)
				exit(exitError)
				return
			}
		}
	}()
	err := run(context.WithValue(ctx, heldKey{}, &holds))
	close(ended)
	<-watched

	if err == nil || ctx.Err() != nil && onlyCanceled(err) {
		return exitOK
	}
	var (
		coded program.ExitError
		usage program.UsageError
	)
	code := exitError
	switch {
	case errors.As(err, &coded):
		code = coded.Code
		if coded.Err == nil {
			return code
		}
	case errors.As(err, &usage):
		code = exitUsage
	}
	program.PrintError(stderr, name, err)
	return code
}
