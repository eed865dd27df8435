package broker

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestSavingTakesASmallPartOfTheTime(t *testing.T) {
	for _, c := range []struct {
		snapshot     int
		locked, want time.Duration
	}{
		{0, 0, 200 * time.Millisecond},
		{1 << 20, time.Millisecond, 200 * time.Millisecond},
		{16 << 20, time.Millisecond, 2 * time.Second},
		{1 << 20, 50 * time.Millisecond, time.Second},
		{16 << 20, 50 * time.Millisecond, 2 * time.Second},
		{1 << 20, 400 * time.Millisecond, 8 * time.Second},
		{1 << 20, time.Minute, 10 * time.Second},
		{160 << 20, time.Minute, 20 * time.Second},
	} {
		testkit.Equal(t, savePause(c.snapshot, c.locked), c.want, "after %d bytes, for which the lock was held for %v", c.snapshot, c.locked)
	}
}
