package lifecycle

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
)

// daemonEnv makes this test binary a daemon of that name, so that the test uses real signals and exit
// codes.
const daemonEnv = "SRTM_LIFECYCLE_TEST_DAEMON"

var daemons = map[string]func() int{
	// drains and reports it, slowly enough that the test acts in between
	"clean": func() int {
		return Main("clean", func(ctx context.Context) error {
			fmt.Println("up")
			<-ctx.Done()
			fmt.Println("draining")
			return ctx.Err()
		})
	},
	// never stops by itself
	"stuck": func() int {
		return Main("stuck", func(ctx context.Context) error {
			fmt.Println("up")
			<-ctx.Done()
			fmt.Println("draining")
			// Runs until the test ends the process. The runtime would report an empty select as a
			// deadlock.
			_, err := io.Copy(io.Discard, os.Stdin)
			return err
		})
	},
	"misused": func() int {
		return Main("misused", func(context.Context) error {
			return fmt.Errorf("flags: %w", program.UsageError{Err: errors.New("--rate -1: want > 0")})
		})
	},
}

// start runs a daemon and waits until the daemon is up.
func start(t *testing.T, name string) (cmd *exec.Cmd, out *bufio.Reader, stderr *bytes.Buffer) {
	t.Helper()
	cmd = exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), daemonEnv+"="+name, "GORACE=atexit_sleep_ms=0")
	stderr = new(bytes.Buffer)
	cmd.Stderr = stderr
	pipe := testkit.Result(cmd.StdoutPipe()).Must(t)
	stdin, err := cmd.StdinPipe() // stays open, and closes when the test process ends
	testkit.Must(t, err)
	testkit.Must(t, cmd.Start())
	t.Cleanup(func() { _ = stdin.Close() })
	return cmd, bufio.NewReader(pipe), stderr
}

func expectLine(t *testing.T, out *bufio.Reader, want string) {
	t.Helper()
	got, err := out.ReadString('\n')
	if err != nil || got != want+"\n" {
		t.Fatalf("line %q, %v; want %q", got, err, want)
	}
}

func TestMainDrainsAtASignal(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(sig.String(), func(t *testing.T) {
			cmd, out, stderr := start(t, "clean")
			expectLine(t, out, "up")
			testkit.Must(t, cmd.Process.Signal(sig))
			expectLine(t, out, "draining")
			if err := cmd.Wait(); err != nil || stderr.Len() != 0 {
				t.Errorf("%v, stderr %q; want a quiet exit with code 0", err, stderr)
			}
		})
	}
}

func TestASecondSignalKills(t *testing.T) {
	for _, second := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(second.String(), func(t *testing.T) {
			if signal.Ignored(second) {
				t.Skip("the parent process has this one ignore the signal, as shells do for what runs in the background")
			}
			cmd, out, _ := start(t, "stuck")
			expectLine(t, out, "up")
			testkit.Must(t, cmd.Process.Signal(syscall.SIGTERM))
			expectLine(t, out, "draining")
			// The handler of the first signal restores the default signals on another goroutine, so
			// the second signal may need more than one try.
			died := make(chan struct{})
			go func() {
				defer close(died)
				_, _ = out.ReadString('\n') // ends with the process
			}()
			again := time.NewTicker(10 * time.Millisecond)
			defer again.Stop()
			for alive := true; alive; {
				_ = cmd.Process.Signal(second) // the process may be gone already
				select {
				case <-died:
					alive = false
				case <-again.C:
				}
			}
			err := cmd.Wait()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != second {
				t.Errorf("%v; want death by %v", err, second)
			}
		})
	}
}

func TestMainReportsBadUsage(t *testing.T) {
	cmd, _, stderr := start(t, "misused")
	err := cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Errorf("%v, want exit code 2", err)
	}
	if want := "misused: flags: --rate -1: want > 0\n"; stderr.String() != want {
		t.Errorf("stderr %q, want %q", stderr, want)
	}
}

func TestExitCodes(t *testing.T) {
	plain := errors.New("no such disk")
	for _, c := range []struct {
		name   string
		err    error
		code   int
		stderr string
	}{
		{"nil", nil, 0, ""},
		{"plain", plain, 1, "tool: no such disk\n"},
		{"usage", program.UsageError{Err: plain}, 2, "tool: no such disk\n"},
		{"wrapped usage", fmt.Errorf("config: %w", program.UsageError{Err: plain}), 2, "tool: config: no such disk\n"},
		{"exit code", fmt.Errorf("plan: %w", program.ExitError{Code: 3, Err: plain}), 3, "tool: plan: no such disk\n"},
		{"several at once", errors.Join(plain, errors.New("no such port")), 1, "tool: no such disk\ntool: no such port\n"},
		{"silent exit code", program.ExitError{Code: 3}, 3, ""},
		{"canceled by itself", context.Canceled, 1, "tool: context canceled\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var stderr strings.Builder
			code := supervise(t.Context(), "tool", func(context.Context) error { return c.err }, &stderr, func(int) { t.Error("exit called") })
			if code != c.code || stderr.String() != c.stderr {
				t.Errorf("code %d, stderr %q; want %d, %q", code, &stderr, c.code, c.stderr)
			}
		})
	}
}

func TestErrorsAfterTheSignal(t *testing.T) {
	lost := errors.New("3 messages lost")
	for _, c := range []struct {
		name string
		err  error
		code int
	}{
		{"canceled", context.Canceled, 0},
		{"canceled and more", errors.Join(context.Canceled, lost), 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			code := supervise(ctx, "tool", func(context.Context) error { return c.err }, io.Discard, func(int) { t.Error("exit called") })
			testkit.Equal(t, code, c.code, "code")
		})
	}
}

func TestStoppingIsBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var (
			stderr strings.Builder
			forced time.Time
			exited = make(chan int, 1)
		)
		signalled := time.Now().Add(time.Hour)
		time.AfterFunc(time.Hour, cancel)
		code := supervise(ctx, "tool", func(ctx context.Context) error {
			<-ctx.Done()
			pass(10 * StopLimit)
			return nil
		}, &stderr, func(code int) { forced = time.Now(); exited <- code })
		if got := <-exited; got != 1 || code != 0 {
			t.Errorf("forced exit code %d, own %d; want 1, 0", got, code)
		}
		if delay := forced.Sub(signalled); delay != StopLimit {
			t.Errorf("exit %v after the signal, want %v", delay, StopLimit)
		}
		if want := "tool: not stopped 30s after the signal; giving up\n"; stderr.String() != want {
			t.Errorf("stderr %q, want %q", &stderr, want)
		}
	})
}

// A part that must finish gets as long as it needs.
func TestTheLimitIsHeld(t *testing.T) {
	const works = 70 * time.Second
	for _, c := range []struct {
		name    string
		release bool
		after   time.Duration // time of the forced exit; 0: no forced exit
	}{
		{"ended in time", true, 0},
		{"released, and then stuck", true, 3 * StopLimit},
		{"never released", false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				began, forced := time.Now(), time.Duration(0)
				supervise(ctx, "tool", func(ctx context.Context) error {
					release := Hold(ctx)
					pass(works)
					if c.release {
						release()
						release() // does no harm
					}
					if c.after > 0 || !c.release {
						pass(works)
					}
					return nil
				}, io.Discard, func(int) { forced = time.Since(began) })
				testkit.Equal(t, forced, c.after, "forced to exit after")
			})
		})
	}
	Hold(t.Context())() // other systems have nothing to hold
}
