package terminal

import (
	"regexp"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// A broker joins and is killed. The loaddistributor and the adaptor in its process log each event
// once, and warn once.
func TestEventsAreLoggedOnce(t *testing.T) {
	c := localtest.Start(t, 0, []string{"--fitting=off"})
	b := c.Join(t, "--broker-id=b", "--policy=strict")
	logs := func(text string) bool { return strings.Contains(c.Control.AllOutput(), text) }
	testkit.WaitFor(t, "the broker's share session", func() bool { return logs("share session opened") })
	// Ports that never accepted are no evidence that the process has ended.
	testkit.WaitFor(t, "the broker's ports", func() bool { return logs("ports accept connections") })
	testkit.Must(t, b.Kill())
	testkit.WaitFor(t, "its shares are free", func() bool { return logs("the broker's shares are free") })
	count, warnings := map[string]int{}, 0
	for _, m := range regexp.MustCompile(`(?m)level=(\w+) msg=("[^"]*"|\S+)(.*\bbroker=b\b.*)$`).FindAllStringSubmatch(c.Control.AllOutput(), -1) {
		if count[m[2]]++; count[m[2]] > 1 {
			t.Errorf("logged twice: %s", m[0])
		}
		if m[1] == "WARN" && !strings.Contains(m[2], "lease over") { // on a slow machine before the broker's end is proven
			warnings++
		}
	}
	if len(count) < 4 || warnings != 1 {
		t.Errorf("%d messages, %d warnings, want one warning:\n%s", len(count), warnings, c.Control.AllOutput())
	}
}
