package obs_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestOutage(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var text bytes.Buffer
		log := slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}}))
		o := obs.NewOutage(log, "the store is unavailable")
		o.Note(nil)
		for range 1001 { // for 25 s, with occasional successes
			o.Note(errors.New("cut off"))
			o.Note(nil)
			<-time.After(25 * time.Millisecond) // virtual
		}
		for range 30 { // for 15 s
			o.Note(nil)
			<-time.After(500 * time.Millisecond)
		}
		o.Note(errors.New("again"))
		testkit.Equal(t, strings.TrimSpace(text.String()), strings.TrimSpace(`
level=WARN msg="the store is unavailable" error="cut off"
level=WARN msg="the store is unavailable" error="cut off" count=401 duration=10s
level=WARN msg="the store is unavailable" error="cut off" count=801 duration=20s
level=INFO msg="works again" after="the store is unavailable" count=1001 duration=25s
level=WARN msg="the store is unavailable" error=again`))
	})
}
