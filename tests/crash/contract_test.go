package crash

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// Contracts hold over restarts. A start adds no tokens, whether the contract comes from a flag or was
// given over HTTP.
func TestRestartsBringNoTokens(t *testing.T) {
	const rate, burst, lives = 20, 50, 6
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace")
	count := func() (n [2]int) {
		return [2]int{len(testkit.ReadTrace(t, trace, "flag")), len(testkit.ReadTrace(t, trace, "http"))}
	}
	for life := range lives {
		d, err := local.NSQD(localtest.Program(t, "nsqd"), dir, fmt.Sprintf("--topic-limit=flag:%d:%d", rate, burst), "--release-trace="+trace, "--arrival-stamps=off", "--drain-timeout=0s")
		testkit.Must(t, err)
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
		testkit.WaitFor(t, "releasing", func() bool {
			now := count()
			return now[0] > before[0] && now[1] > before[1]
		})
		end := d.Stop
		if life%2 == 1 {
			end = d.Kill
		}
		testkit.Must(t, end())
	}
	for _, topic := range []string{"flag", "http"} {
		eligible, released := testkit.Times(testkit.ReadTrace(t, trace, topic))
		if _, err := testkit.Envelope(eligible, rate*1000, burst); err != nil {
			t.Errorf("%s, by eligible time: %v", topic, err)
		}
		// The machine may delay the broker: messages that arrived meanwhile then leave at once.
		const stall = 2 // s
		if _, err := testkit.Envelope(released, rate*1000, burst+stall*rate); err != nil {
			t.Errorf("%s, by release time: %v", topic, err)
		}
		t.Logf("%s: %d messages in %d lives, of %v", topic, len(eligible), lives, released[len(released)-1].Sub(released[0]))
	}
}
