package obs

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestAKindOfLineIsLoggedSoOftenASecondAndTheRestCounted(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		out := newStuck()
		close(out.free)
		inner, _, err := NewLogger(out, "info", "text")
		testkit.Must(t, err)
		log, end := Sparse(inner)
		count := func(what string) int { return strings.Count(out.text(), what) }
		for i := range 446 {
			log.Warn("connection closed", KeyRemote, i, KeyReason, "E_INVALID")
			log.Debug("connection ended", KeyRemote, i)
		}
		log.With(KeyRemote, 1).Warn("connection closed", KeyReason, "E_BAD_TOPIC") // another kind
		if got := count("reason=E_INVALID"); got != LinesPerSecond {
			t.Errorf("%d lines, want %d", got, LinesPerSecond)
		}
		if count("E_BAD_TOPIC") != 1 || count("connection ended") != 0 {
			t.Error(out.text())
		}
		testkit.Equal(t, count("left out"), 0, "said at once")
		pass(time.Second)
		synctest.Wait()
		if got := count(fmt.Sprintf(`level=WARN msg="lines left out: too many of a kind" of="connection closed" reason=E_INVALID count=%d`, 446-LinesPerSecond)); got != 1 || count("left out") != 1 {
			t.Error(out.text())
		}

		// In a new second, the log reports the remaining omitted lines at the end.
		out.reset()
		for range LinesPerSecond + 3 {
			log.Error("bad")
		}
		end()
		if count("msg=bad") != LinesPerSecond || count("level=ERROR msg=\"lines left out: too many of a kind\" of=bad reason=\"\" count=3") != 1 {
			t.Error(out.text())
		}
		end()
		pass(time.Minute)
		testkit.Equal(t, count("left out"), 1, "times said")

		// Slow lines are never omitted.
		out.reset()
		for range 5 * LinesPerSecond {
			log.Error("slow")
			pass(time.Second / LinesPerSecond)
		}
		end()
		if count("msg=slow") != 5*LinesPerSecond || count("left out") != 0 {
			t.Error(out.text())
		}
	})
}

// Even if a client could choose the reason, memory would stay bounded.
func TestKindsAreBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var out bytes.Buffer
		log, end := Sparse(slog.New(slog.NewTextHandler(&out, nil)))
		for i := range 10_000 {
			log.Warn("m", KeyReason, i)
		}
		end()
		testkit.Equal(t, strings.Count(out.String(), "\n"), maxKinds+LinesPerSecond+1, "lines")
	})
}

// pass lets virtual time go by.
func pass(d time.Duration) { <-time.After(d) }
