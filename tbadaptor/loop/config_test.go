package loop_test

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/tbadaptor/loop"
)

// A strict broker ends its lease by its own clock. Two clocks that NTP slews diverge by up to 0.1 % of
// the lease. The clock bound has to cover this difference.
func TestClockBoundCoversSlewedClocks(t *testing.T) {
	for _, c := range []struct {
		session, bound time.Duration
		valid          bool
	}{
		{30 * time.Second, 200 * time.Millisecond, true}, // the defaults
		{200 * time.Second, 200 * time.Millisecond, true},
		{201 * time.Second, 200 * time.Millisecond, false},
		{10 * time.Minute, 200 * time.Millisecond, false},
		{10 * time.Minute, 600 * time.Millisecond, true},
	} {
		cfg := loop.Config{Period: time.Second, Window: time.Second, AckTimeout: time.Second, Leases: loop.DefaultLeases(), Log: slog.New(slog.DiscardHandler)}
		cfg.Leases.Session, cfg.Leases.ClockBound = c.session, c.bound
		err := cfg.Validate()
		if (err == nil) != c.valid || err != nil && !strings.Contains(err.Error(), "0.1 %") {
			t.Errorf("session lease %v, clock bound %v: %v", c.session, c.bound, err)
		}
	}
}
