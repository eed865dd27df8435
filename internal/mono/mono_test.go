package mono_test

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

func TestAddSaturatesAtNever(t *testing.T) {
	if got := mono.Never.Add(time.Second); got != mono.Never {
		t.Errorf("Never+1s = %d, want Never", got)
	}
	if got := (mono.Never - 1).Add(time.Hour); got != mono.Never {
		t.Errorf("(Never-1)+1h = %d, want Never", got)
	}
	if got := mono.Time(5).Add(-7); got != -2 {
		t.Errorf("5-7ns = %d, want -2", got)
	}
}
