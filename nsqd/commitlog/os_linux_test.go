package commitlog

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// The disk has 2 MB and is really full. The child has its own mounts, so that the system removes the disk in any case
// when the child ends.
func TestFullDiskIsReported(t *testing.T) {
	path := t.TempDir()
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Skipf("no shell to mount a small disk with: %v", err)
	}
	cmd := exec.Command(sh, "-c", fmt.Sprintf(`mount -t tmpfs -o size=2m none %s || exit 77; exec "$0"`, path), self(t).Path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWNS | syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		}
	}
	cmd.Env = append(os.Environ(), childEnv+"=filler "+path)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() == 77 {
		t.Skipf("this system lets us mount no small disk: %v %s", err, strings.TrimSpace(out.String()))
	}
	if err != nil {
		t.Errorf("%v: %s", err, out.String())
	}
}
