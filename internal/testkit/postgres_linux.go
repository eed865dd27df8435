package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// PostgreSQL runs a private PostgreSQL of the distribution, on a Unix socket and
// optionally an address. It returns the URL, a function that kills the server by kill -9,
// and a function that starts the server again.
func PostgreSQL(t testing.TB, listen string) (url string, kill, start func()) {
	t.Helper()
	programs, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil || len(programs) == 0 {
		t.Skip("PostgreSQL is not installed (Debian: postgresql)")
	}
	bin := filepath.Dir(slices.Max(programs))
	dir, err := os.MkdirTemp("", "pg") // short enough for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	var attributes *syscall.SysProcAttr
	if os.Getuid() == 0 { // PostgreSQL refuses to run as root
		u, err := user.Lookup("postgres")
		if err != nil {
			t.Skip("there is no user postgres to run it as")
		}
		uid, _ := strconv.Atoi(u.Uid)
		gid, _ := strconv.Atoi(u.Gid)
		if err := os.Chown(dir, uid, gid); err != nil {
			t.Fatal(err)
		}
		attributes = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	}
	data := filepath.Join(dir, "data")
	run := func(program string, args ...string) *exec.Cmd {
		cmd := exec.Command(filepath.Join(bin, program), args...)
		cmd.Dir, cmd.SysProcAttr = dir, attributes
		return cmd
	}
	if out, err := run("initdb", "-D", data, "-U", "srtm", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync").CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	hba, err := os.OpenFile(filepath.Join(data, "pg_hba.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(hba, "host all all samenet trust")
	hba.Close()
	start = func() {
		t.Helper()
		for limit := time.Now().Add(time.Minute); ; { // a killed server releases its memory after a moment
			out, err := run("pg_ctl", "-D", data, "-w", "-t", "60", "-l", filepath.Join(dir, "log"), "-o", "-c listen_addresses="+listen+" -c fsync=off -k "+dir, "start").CombinedOutput()
			if err == nil {
				return
			}
			if time.Now().After(limit) {
				t.Fatalf("pg_ctl start: %v\n%s", err, out)
			}
		}
	}
	kill = func() {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
		if err != nil {
			t.Fatal(err)
		}
		first, _, _ := strings.Cut(string(text), "\n")
		pid, err := strconv.Atoi(first)
		if err != nil || pid < 2 {
			t.Fatal(pid, err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	start()
	t.Cleanup(func() {
		if out, err := run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop").CombinedOutput(); err != nil {
			t.Errorf("pg_ctl stop: %v\n%s", err, out)
		}
	})
	return "postgres:///postgres?user=srtm&host=" + dir, kill, start
}
