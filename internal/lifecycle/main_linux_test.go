package lifecycle

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Main does not wait for a reader, even with its last lines.
func TestMainEndsWhenNobodyReadsItsErrors(t *testing.T) {
	r, w, err := os.Pipe()
	testkit.Must(t, err)
	defer r.Close()
	size := testkit.Result(unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 1)).Must(t)
	_, err = w.Write(make([]byte, size))
	testkit.Must(t, err)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), daemonEnv+"=misused", "GORACE=atexit_sleep_ms=0")
	cmd.Stderr = w
	testkit.Must(t, cmd.Start())
	_ = w.Close() // the process has its own copy
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Errorf("%v, want exit code 2", err)
	}
}
