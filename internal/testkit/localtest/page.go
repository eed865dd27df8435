package localtest

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

// newGroup returns a process group without commands, which ends with this process. Its first process
// watches this process: commands join the group later, so none of them runs unwatched. end terminates
// the group, and waits until ended says that the commands have ended.
func newGroup(t testing.TB) (group int, end func(ended func() error)) {
	t.Helper()
	here, alive, err := os.Pipe() // only this process has alive, so here ends with this process
	testkit.Must(t, err)
	watcher := exec.Command("bash", "-c", "read; kill -TERM -- -$$")
	watcher.Stdin, watcher.SysProcAttr = here, &syscall.SysProcAttr{Setpgid: true}
	testkit.Must(t, errors.Join(watcher.Start(), here.Close()))
	group = watcher.Process.Pid
	return group, func(ended func() error) {
		defer alive.Close()
		_ = syscall.Kill(-group, syscall.SIGTERM) // most commands leave nothing
		if ended() != nil {
			_ = syscall.Kill(-group, syscall.SIGKILL)
		}
		_ = watcher.Wait() // only now may the group's number be another group's
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
	log, err := os.CreateTemp(t.TempDir(), "printed") // not a pipe, because remaining processes may keep it open
	testkit.Must(t, err)
	defer log.Close()
	ended, running, err := os.Pipe()
	testkit.Must(t, err)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{running}
	group, end := newGroup(t)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: group}
	t.Cleanup(func() {
		defer ended.Close()
		end(func() error {
			_ = ended.SetReadDeadline(time.Now().Add(local.Patience))
			_, err := io.Copy(io.Discard, ended)
			if err != nil {
				t.Errorf("what these commands started has not ended: %v\n%s", err, commands)
			}
			return err
		})
	})
	testkit.Must(t, errors.Join(cmd.Start(), running.Close()))
	err = cmd.Wait()
	text := string(testkit.Result(os.ReadFile(log.Name())).Must(t))
	if err != nil {
		t.Errorf("%v: %s", err, text)
	}
	return text, err == nil
}
