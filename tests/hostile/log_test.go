package hostile

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// No process reads an nsqd's standard error, and its pipe is full. The nsqd starts, reports faults to bad
// clients, serves the others, and stops. It used to freeze with the 446th bad client.
func TestALogWithoutAReader(t *testing.T) {
	nsqd := given()
	if nsqd == "" {
		nsqd = localtest.Program(t, "nsqd")
	}
	b := start(t, unread(t, nsqd), false, "--log-level=debug")
	o := meet(t, b)
	for range 500 {
		testkit.Must(t, b.send(t.Context(), []byte("NONSENSE\n")))
	}
	o.measure(t, slice)
}

// unread returns a program that runs the binary with a full pipe, private to it, as standard error.
func unread(t *testing.T, binary string) string {
	t.Helper()
	dir := t.TempDir()
	pipe, program := filepath.Join(dir, "stderr"), filepath.Join(dir, "nsqd")
	script := fmt.Sprintf("#!/bin/sh\nmkfifo %[1]s && exec 3<>%[1]s && dd if=/dev/zero of=%[1]s bs=64k count=1 oflag=nonblock 2>/dev/null && exec %[2]s \"$@\" 2>&3\n", pipe, binary)
	testkit.Must(t, os.WriteFile(program, []byte(script), 0o755))
	return program
}
