package crash

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// readTrace returns the times of a release trace, by topic; a line that is being
// written is left out.
func readTrace(t *testing.T, path string) (eligible, released map[string][]mono.Time) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	eligible, released = map[string][]mono.Time{}, map[string][]mono.Time{}
	for line := range strings.Lines(string(text)) {
		var arrival, e, r mono.Time
		topic, rest, _ := strings.Cut(line, ",")
		if n, err := fmt.Sscanf(rest, "%d,%d,%d\n", &arrival, &e, &r); n == 3 && err == nil {
			eligible[topic], released[topic] = append(eligible[topic], e), append(released[topic], r)
		}
	}
	return eligible, released
}

// Contracts hold over restarts: a start brings no tokens, be the contract of a
// flag or given over HTTP before.
func TestRestartsBringNoTokens(t *testing.T) {
	const rate, burst, lives = 20, 50, 6
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace")
	count := func() (n [2]int) {
		eligible, _ := readTrace(t, trace)
		return [2]int{len(eligible["flag"]), len(eligible["http"])}
	}
	for life := range lives {
		d, err := local.NSQD(localtest.Program(t, "nsqd"), dir, fmt.Sprintf("--topic-limit=flag:%d:%d", rate, burst), "--release-trace="+trace, "--arrival-stamps=off", "--drain-timeout=0s")
		if err != nil {
			t.Fatal(err)
		}
		defer d.Kill()
		order := func(path, body string) {
			t.Helper()
			if code, answer := ask(t, "http://"+d.HTTP+path, body); code != 200 {
				t.Fatalf("%s: %d %s", path, code, answer)
			}
		}
		if life == 0 {
			order("/topic/create?topic=http", "-")
			order(fmt.Sprintf("/topic/limit?topic=http&rate=%d&burst=%d", rate, burst), "-")
		}
		before := count()
		for _, topic := range []string{"flag", "http"} {
			order("/channel/create?channel=c&topic="+topic, "-")
			order("/mpub?topic="+topic, strings.Repeat("x\n", 2*burst))
		}
		eventually(t, "releasing", func() bool {
			now := count()
			return now[0] > before[0] && now[1] > before[1]
		})
		end := d.Stop
		if life%2 == 1 {
			end = d.Kill
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
	}
	eligible, released := readTrace(t, trace)
	for _, topic := range []string{"flag", "http"} {
		if _, err := testkit.Envelope(eligible[topic], rate*1000, burst); err != nil {
			t.Errorf("%s, by eligible time: %v", topic, err)
		}
		// The machine may hold the broker up: what arrived then leaves later at once.
		const stall = 2 // s
		if _, err := testkit.Envelope(released[topic], rate*1000, burst+stall*rate); err != nil {
			t.Errorf("%s, by release time: %v", topic, err)
		}
		t.Logf("%s: %d messages in %d lives, of %v", topic, len(eligible[topic]), lives, released[topic][len(released[topic])-1].Sub(released[topic][0]))
	}
}
