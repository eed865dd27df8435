package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
)

// Exit codes of a daemon.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
)

// StopLimit is how long a daemon may take to stop after the first signal, unless
// something holds it.
const StopLimit = 30 * time.Second

// FlushLimit is how long the last lines of a log may take at the end.
const FlushLimit = 500 * time.Millisecond

type heldKey struct{}

// Hold keeps StopLimit from ending the daemon before release is called: for what
// must not be given up, such as writing what would be lost. ctx is that of a run
// function of Main, or one derived from it; any other does nothing.
func Hold(ctx context.Context) (release func()) {
	held, _ := ctx.Value(heldKey{}).(*atomic.Int32)
	if held == nil {
		return func() {}
	}
	held.Add(1)
	return sync.OnceFunc(func() { held.Add(-1) })
}

// KeepPipes has a write to a standard output whose reader is gone fail with EPIPE, where it
// would end the process, until restore is called.
func KeepPipes() (restore func()) {
	signal.Ignore(syscall.SIGPIPE)
	return func() { signal.Reset(syscall.SIGPIPE) }
}

// Survive keeps the process running when its terminal closes (SIGHUP), and when the reader of
// its standard error or output ends (SIGPIPE): such a write fails with EPIPE instead. A
// supervisor takes both signals for a clean exit and would not restart the process.
func Survive() {
	signal.Ignore(syscall.SIGHUP)
	KeepPipes()
}

// OnHangup calls reload at each SIGHUP, on one goroutine, until stop is called. Signals that
// arrive during a call cause one more call. stop waits for the goroutine. From then on the
// process ignores SIGHUP.
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

// UsageError marks an error as the caller's: a bad flag, a bad configuration.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }
func (e UsageError) Unwrap() error { return e.Err }

// ExitError carries an exit code other than 1, for tools whose codes mean
// something (srtm plan: 3 is infeasible). Err may be nil: nothing is printed.
type ExitError struct {
	Code int
	Err  error
}

func (e ExitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}
func (e ExitError) Unwrap() error { return e.Err }

// Main runs a daemon and returns its exit code, for os.Exit:
//
//	func main() { os.Exit(lifecycle.Main("nsqd", run)) }
//
// The context ends at the first SIGINT or SIGTERM. The second one kills the
// process at once, and so does the end of StopLimit, with exit code 1, or the
// first whole multiple of it at which nothing holds it (see Hold). An
// error of run is printed on standard error by PrintError; the code is 0 without an error, 2 for a UsageError, what an ExitError says, and
// else 1. Lines on obs.Stderr that are not read are waited for no longer than
// FlushLimit.
func Main(name string, run func(context.Context) error) int {
	ctx, restore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer restore()
	// Giving the signals back to the runtime makes the next one fatal.
	context.AfterFunc(ctx, restore)
	code := supervise(ctx, name, run, obs.Stderr, func(code int) {
		obs.Stderr.Flush(FlushLimit)
		os.Exit(code)
	})
	obs.Stderr.Flush(FlushLimit)
	return code
}

// supervise is Main after the signals. exit is called only when run outlives
// StopLimit.
func supervise(ctx context.Context, name string, run func(context.Context) error, stderr io.Writer, exit func(int)) int {
	over := make(chan struct{})
	watched := make(chan struct{})
	var held atomic.Int32
	go func() {
		defer close(watched)
		select {
		case <-over:
			return
		case <-ctx.Done():
		}
		limit := time.NewTicker(StopLimit)
		defer limit.Stop()
		for took := StopLimit; ; took += StopLimit {
			select {
			case <-over:
				return
			case <-limit.C:
			}
			if held.Load() == 0 {
				fmt.Fprintf(stderr, "%s: not stopped %v after the signal; giving up\n", name, took)
				exit(exitError)
				return
			}
		}
	}()
	err := run(context.WithValue(ctx, heldKey{}, &held))
	close(over)
	<-watched

	if err == nil || ctx.Err() != nil && onlyCanceled(err) {
		return exitOK
	}
	var (
		coded ExitError
		usage UsageError
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
	PrintError(stderr, name, err)
	return code
}

// PrintError writes "name: error", and of several errors, joined, each on a line
// of its own, in one write. What others have said in it is printable.
func PrintError(w io.Writer, name string, err error) {
	prefix := name + ": "
	fmt.Fprintln(w, prefix+strings.ReplaceAll(obs.Printable(err.Error()), "\n", "\n"+prefix))
}
