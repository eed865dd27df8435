package localtest

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Block is a code block of a page.
type Block struct{ Language, Text string }

var blocks = regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$")

// Blocks returns the code blocks of a docs page, in order.
func Blocks(t testing.TB, page string) (all []Block) {
	t.Helper()
	text := testkit.Result(os.ReadFile(filepath.Join(testkit.Root(t), "docs", page))).Must(t)
	for _, m := range blocks.FindAllStringSubmatch(string(text), -1) {
		all = append(all, Block{m[1], m[2]})
	}
	if n := strings.Count(string(text), "\n```") / 2; len(all) != n || n == 0 {
		t.Fatalf("%d blocks of %s, want %d", len(all), page, n)
	}
	return all
}

// guard terminates a process group once this process has ended, until unguard.
func guard(t testing.TB, group int) (unguard func()) {
	t.Helper()
	here, alive, err := os.Pipe() // only this process has alive, so here ends with this process
	testkit.Must(t, err)
	cmd := exec.Command("bash", "-c", "read; kill -TERM -- -$1", "guard", strconv.Itoa(group))
	cmd.Stdin, cmd.SysProcAttr = here, &syscall.SysProcAttr{Setpgid: true}
	testkit.Must(t, errors.Join(cmd.Start(), here.Close()))
	return func() {
		_ = cmd.Process.Kill() // before the group's number may be another group's
		_ = cmd.Wait()
		alive.Close()
	}
}

// Bash runs commands with bash in a folder, with env added to the environment, and
// returns the output. If a command fails, the test fails and ok is false. Processes that
// the commands leave running end with the test, also if the test process is killed. prefix is a command that runs bash; none:
// bash itself.
func Bash(t testing.TB, prefix []string, folder string, env []string, commands string) (printed string, ok bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), local.Patience)
	defer cancel()
	args := append(append([]string(nil), prefix...), "bash", "-e", "-o", "pipefail", "-c", commands)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir, cmd.Env = folder, append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	log, err := os.CreateTemp(t.TempDir(), "printed") // not a pipe, because remaining processes may keep it open
	testkit.Must(t, err)
	defer log.Close()
	ended, running, err := os.Pipe()
	testkit.Must(t, err)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{running}
	err = errors.Join(cmd.Start(), running.Close())
	testkit.Must(t, err)
	unguard := guard(t, cmd.Process.Pid)
	t.Cleanup(func() {
		defer ended.Close()
		defer unguard()
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) // most commands leave nothing
		_ = ended.SetReadDeadline(time.Now().Add(local.Patience))
		if _, err := io.Copy(io.Discard, ended); err != nil {
			t.Errorf("what these commands started has not ended: %v\n%s", err, commands)
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		}
	})
	err = cmd.Wait()
	text := string(testkit.Result(os.ReadFile(log.Name())).Must(t))
	if err != nil {
		t.Errorf("%v: %s", err, text)
	}
	return text, err == nil
}
