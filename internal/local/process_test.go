package local

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// program writes a script.
func program(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	testkit.Must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755))
	return path
}

// ready reports whether a script has written the file "ready".
func ready(dir string) func() error {
	return func() error {
		_, err := os.Stat(filepath.Join(dir, "ready"))
		return err
	}
}

func TestStopReportsTheExitCode(t *testing.T) {
	for name, c := range map[string]struct {
		trap string
		ok   bool
	}{
		"0":  {"exit 0", true},
		"66": {"echo a race; exit 66", false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			testkit.Must(t, syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
			// The script opens the pipe for reading and writing, so that its read waits for ever.
			d, err := Run(program(t, "trap '"+c.trap+"' TERM\nexec 3<>fifo\n: > ready\nread -r line <&3\n"), dir, nil, ready(dir))
			testkit.Must(t, err)
			if err := d.Stop(); (err == nil) != c.ok {
				t.Errorf("got %v", err)
			}
			if !c.ok && !strings.Contains(d.Output(), "a race") {
				t.Errorf("output: %q", d.Output())
			}
			if err := d.Stop(); err != nil {
				t.Errorf("the second time: %v", err)
			}
		})
	}
}

func TestStopTellsWhereAProcessHangs(t *testing.T) {
	dir := t.TempDir()
	hangs := program(t, "trap '' TERM\ntrap 'echo here; exit 2' QUIT\n: > ready\nwhile :; do sleep 0.01; done\n")
	p := testkit.Result(Start(hangs, nil, Options{Dir: dir, Ready: ready(dir), Within: time.Second})).Must(t)
	testkit.ErrorHas(t, p.Stop(), "did not stop within 1s of SIGTERM; it printed last:\nhere\n")
}

func TestRunOfWhatEndsAtOnce(t *testing.T) {
	never := func() error { return errors.New("never") }
	if _, err := Run(program(t, "echo why not; exit 1\n"), t.TempDir(), nil, never); err == nil || !strings.Contains(err.Error(), "why not") {
		t.Errorf("got %v, want what it printed", err)
	}
	_, err := Run(filepath.Join(t.TempDir(), "nothing"), t.TempDir(), nil, never)
	testkit.ErrorIs(t, err, os.ErrNotExist)
}

func TestPortsAreGivenOnce(t *testing.T) {
	seen := map[string]bool{}
	for range 20 {
		some := testkit.Result(Ports(5)).Must(t)
		for _, address := range some {
			if seen[address] {
				t.Fatalf("%s twice", address)
			}
			seen[address] = true
		}
	}
	testkit.Equal(t, len(seen), 100, "addresses")
}
