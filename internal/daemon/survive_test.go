package daemon

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
)

// daemonEnv makes this test binary a daemon, so that the test uses real signals and descriptors.
const daemonEnv = "SRTM_DAEMON_TEST"

func TestMain(m *testing.M) {
	if os.Getenv(daemonEnv) != "" {
		Main(&Program{
			Name: "thing", Validate: func() error { return nil },
			Run: func(ctx context.Context, log *slog.Logger, _ *slog.LevelVar) error {
				log.Info("thing is up")
				<-ctx.Done()
				log.Info("thing stops")
				obs.Stderr.Flush(lifecycle.FlushLimit)
				return os.WriteFile(os.Getenv(daemonEnv), fmt.Append(nil, obs.Stderr.Dropped()), 0o600)
			},
		})
	}
	os.Exit(m.Run())
}

// lines holds the output of a process to a pipe so far.
type lines struct{ changed chan string }

func (l lines) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		l.changed <- line
	}
	return len(p), nil
}

func (l lines) until(t *testing.T, want string) {
	t.Helper()
	limit := time.After(testkit.Hang)
	for {
		select {
		case line := <-l.changed:
			if strings.Contains(line, want) {
				return
			}
		case <-limit:
			t.Fatalf("no line with %q", want)
		}
	}
}

// thing starts a daemon. dropped returns how many lines of its log could not be written, after the
// daemon has ended.
func thing(t *testing.T) (cmd *exec.Cmd, dropped func() string) {
	path := t.TempDir() + "/dropped"
	cmd = exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), daemonEnv+"="+path, "GORACE=atexit_sleep_ms=0")
	return cmd, func() string {
		t.Helper()
		return string(testkit.Result(os.ReadFile(path)).Must(t))
	}
}

func TestHangupReloadsAndDoesNotEndTheDaemon(t *testing.T) {
	cmd, dropped := thing(t)
	log := lines{make(chan string, 100)}
	cmd.Stderr = log
	testkit.Must(t, cmd.Start())
	log.until(t, "thing is up")
	for range 3 {
		testkit.Must(t, cmd.Process.Signal(syscall.SIGHUP))
		log.until(t, "SIGHUP")
	}
	testkit.Must(t, cmd.Process.Signal(syscall.SIGTERM))
	testkit.Must(t, cmd.Wait())
	testkit.Equal(t, dropped(), "0", "dropped lines")
}

func TestClosedLogDoesNotEndTheDaemon(t *testing.T) {
	r, w, err := os.Pipe()
	testkit.Must(t, err)
	cmd, dropped := thing(t)
	cmd.Stdout, cmd.Stderr = w, w
	testkit.Must(t, cmd.Start())
	testkit.Must(t, w.Close()) // the process has its own copy
	var first bytes.Buffer
	for !strings.Contains(first.String(), "thing is up") {
		b := make([]byte, 1000)
		n := testkit.Result(r.Read(b)).Must(t)
		first.Write(b[:n])
	}
	testkit.Must(t, r.Close())
	testkit.Must(t, cmd.Process.Signal(syscall.SIGTERM))
	testkit.Must(t, cmd.Wait())
	testkit.Equal(t, dropped(), "1", "dropped lines")
}
