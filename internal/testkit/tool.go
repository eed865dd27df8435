package testkit

import (
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// tools maps a Go package to the path of its program. The go command takes a second to
// answer, so Tool runs it once per package.
var tools sync.Map

// Tool returns the path of a program that tests/go.mod pins by a tool line, such as
// "github.com/nsqio/nsq/apps/nsqd". The go command builds the program and caches it. The
// module of the tests requires these programs, so no program of ours does.
func Tool(t testing.TB, pkg string) string {
	t.Helper()
	if path, built := tools.Load(pkg); built {
		return path.(string)
	}
	cmd := exec.CommandContext(t.Context(), "go", "tool", "-n", pkg)
	cmd.Dir = filepath.Join(Root(t), "tests")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, stderr.String())
	}
	path := strings.TrimSpace(string(output))
	tools.Store(pkg, path)
	return path
}

// Upstream returns the path of a program of NSQ, such as "nsqd" or "nsq_tail", in the
// version pinned by tests/go.mod.
func Upstream(t testing.TB, name string) string {
	t.Helper()
	return Tool(t, "github.com/nsqio/nsq/apps/"+name)
}
