package local_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
)

// A test process that restarts a broker leaves the broker's port unused for a moment. Another test
// process must not start its own broker there: the first test would talk to that broker.
func TestPortsBelongToOneProcess(t *testing.T) {
	const count = 50
	if os.Getenv("SRTM_TEST_PORTS") != "" {
		os.Stdout.WriteString("ports " + strings.Join(testkit.Result(local.PortsFrom(20_000, count)).Must(t), " ") + "\n")
		return
	}
	mine := testkit.Result(local.PortsFrom(20_000, count)).Must(t)
	child := exec.Command(os.Args[0], "-test.run=^TestPortsBelongToOneProcess$", "-test.v")
	child.Env = append(os.Environ(), "SRTM_TEST_PORTS=1")
	out := testkit.Result(child.CombinedOutput()).Must(t)
	_, line, found := strings.Cut(string(out), "ports ")
	if !found {
		t.Fatalf("the other process printed no ports:\n%s", out)
	}
	line, _, _ = strings.Cut(line, "\n")
	taken := map[string]bool{}
	for _, address := range mine {
		taken[address] = true
	}
	for _, address := range strings.Fields(line) {
		if taken[address] {
			t.Errorf("%s belongs to both processes", address)
		}
	}
}
