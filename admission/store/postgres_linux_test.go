package store_test

import (
	"context"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/tokenbucket"
)

// postgres runs a PostgreSQL of its own, from what the distribution installs, on a
// Unix socket, and returns its URL, and what kills it by kill -9 and has it come back.
func postgres(t *testing.T) (url string, kill, start func()) {
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
	start = func() {
		t.Helper()
		for limit := time.Now().Add(time.Minute); ; { // what was killed lets go of its memory in a moment
			out, err := run("pg_ctl", "-D", data, "-w", "-t", "60", "-l", filepath.Join(dir, "log"), "-o", "-c listen_addresses= -c fsync=off -k "+dir, "start").CombinedOutput()
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

func TestPostgreSQL(t *testing.T) {
	database, _, _ := postgres(t)
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

// kill -9 of PostgreSQL under a server: that goes on with what it has, saves it when the
// database is back, and through it all each key is admitted its capacity, and no more.
func TestPostgreSQLIsKilled(t *testing.T) {
	database, kill, start := postgres(t)
	db, err := store.Open(t.Context(), database)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })               // after the servers
	share := tokenbucket.Share{Rate: 1, Burst: 10} // a credit takes 1000 s
	if _, err := db.SetRules(t.Context(), []rule.Rule{{Key: "key", Share: share}, {Key: "strict", Share: share, Strict: true}}); err != nil {
		t.Fatal(err)
	}
	serve := func() (c *client.Client, stop func()) {
		s, err := server.New(t.Context(), server.Config{Address: "127.0.0.1:0", Advertise: "one", Store: db, Checkpoint: 20 * time.Millisecond, Renew: 100 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		if c, err = client.New(client.Config{Servers: []string{s.Addr().String()}, Attempts: 10_000}); err != nil {
			t.Fatal(err)
		}
		stop = sync.OnceFunc(func() {
			c.Close()
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		t.Cleanup(stop)
		return c, stop
	}
	until := func(what string, is func() bool) {
		t.Helper()
		for limit := time.Now().Add(time.Minute); !is(); <-time.After(10 * time.Millisecond) {
			if time.Now().After(limit) {
				t.Fatal(what)
			}
		}
	}
	holds := func(want tokenbucket.Tokens) func() bool {
		return func() bool {
			for _, key := range []string{"key", "strict"} {
				if c, err := db.Credit(t.Context(), key); err != nil || c == nil || c.Credits/tokenbucket.Token != want {
					return false
				}
			}
			return true
		}
	}
	c, stop := serve()
	admitted := func(key string, cost uint32) func() bool {
		return func() bool { return c.Ask(t.Context(), key, cost).Admit }
	}
	for _, key := range []string{"key", "strict"} {
		until("a key is admitted", admitted(key, 3))
	}
	until("they are saved", holds(7))
	kill()
	if d := c.Ask(t.Context(), "key", 1); !d.Admit || d.Left != 6 {
		t.Errorf("without its store: %+v", d)
	}
	start()
	until("a strict key, after the lease was renewed", admitted("strict", 1))
	until("what was admitted meanwhile is saved", holds(6))
	stop()
	kill()
	start()
	if c, _ = serve(); !admitted("key", 6)() || !admitted("strict", 6)() {
		t.Error("less is left than was saved")
	}
	if admitted("key", 1)() || admitted("strict", 1)() {
		t.Error("more was admitted than the capacity")
	}
}
