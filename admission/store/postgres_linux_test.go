package store_test

import (
	"context"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/store"
)

// postgres runs a PostgreSQL of its own, from what the distribution installs, on a
// Unix socket, and returns its URL.
func postgres(t *testing.T) string {
	t.Helper()
	programs, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil || len(programs) == 0 {
		t.Skip("PostgreSQL is not installed (Debian: postgresql)")
	}
	bin := filepath.Dir(slices.Max(programs))
	dir, err := os.MkdirTemp("", "pg") // a path short enough for a socket's
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	var as *syscall.SysProcAttr
	if os.Getuid() == 0 { // as which PostgreSQL does not run
		u, err := user.Lookup("postgres")
		if err != nil {
			t.Skip("there is no user postgres to run it as")
		}
		uid, _ := strconv.Atoi(u.Uid)
		gid, _ := strconv.Atoi(u.Gid)
		if err := os.Chown(dir, uid, gid); err != nil {
			t.Fatal(err)
		}
		as = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	}
	data := filepath.Join(dir, "data")
	run := func(program string, args ...string) *exec.Cmd {
		cmd := exec.Command(filepath.Join(bin, program), args...)
		cmd.Dir, cmd.SysProcAttr = dir, as
		return cmd
	}
	if out, err := run("initdb", "-D", data, "-U", "srtm", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync").CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	if out, err := run("pg_ctl", "-D", data, "-w", "-t", "60", "-l", filepath.Join(dir, "log"), "-o", "-c listen_addresses= -c fsync=off -k "+dir, "start").CombinedOutput(); err != nil {
		t.Fatalf("pg_ctl start: %v\n%s", err, out)
	}
	t.Cleanup(func() {
		if out, err := run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop").CombinedOutput(); err != nil {
			t.Errorf("pg_ctl stop: %v\n%s", err, out)
		}
	})
	return "postgres:///postgres?user=srtm&host=" + dir
}

func TestPostgreSQL(t *testing.T) {
	database := postgres(t)
	t.Run("owners", func(t *testing.T) { owners(t, database) })
	suite(t, database)
}

// What cannot be reached is said within the caller's time, and changes nothing.
func TestPostgreSQLIsAway(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if s, err := store.Open(ctx, "postgres:///postgres?user=srtm&host="+t.TempDir()); err == nil {
		s.Close()
		t.Error("a database was opened that is not there")
	}
}
