package pages

import (
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestCommandsEndWithAKilledTestProcess(t *testing.T) {
	const inside = "SRTM_TEST_KILLED"
	if os.Getenv(inside) != "" { // the process to be killed; all its processes inherit descriptor 4
		localtest.Bash(t, nil, t.TempDir(), nil, "sleep 1000 & echo >&4")
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	running, open, err := os.Pipe()
	testkit.Must(t, err)
	defer running.Close()
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env, cmd.ExtraFiles = append(os.Environ(), inside+"=1"), []*os.File{open, open}
	waits, err := cmd.StdinPipe()
	testkit.Must(t, err)
	defer waits.Close()
	testkit.Must(t, cmd.Start())
	testkit.Must(t, open.Close())
	testkit.Must(t, running.SetReadDeadline(time.Now().Add(testkit.Hang)))
	_, err = io.ReadFull(running, make([]byte, 1))
	testkit.NoError(t, err)
	testkit.Must(t, cmd.Process.Kill())
	_ = cmd.Wait() // it was killed
	if _, err := io.Copy(io.Discard, running); err != nil {
		t.Errorf("what the commands started runs on after the test process was killed: %v", err)
	}
}
