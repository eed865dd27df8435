package stamp_test

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/kernel/stamp"
)

func TestMonoAddSaturatesAtNever(t *testing.T) {
	if got := stamp.Never.Add(time.Second); got != stamp.Never {
		t.Errorf("Never+1s = %d, want Never", got)
	}
	if got := (stamp.Never - 1).Add(time.Hour); got != stamp.Never {
		t.Errorf("(Never-1)+1h = %d, want Never", got)
	}
	if got := stamp.Mono(5).Add(-7); got != -2 {
		t.Errorf("5-7ns = %d, want -2", got)
	}
}

func TestSourceNamesAreDistinct(t *testing.T) {
	seen := map[string]bool{}
	for s := range stamp.Sources {
		name := stamp.Source(s).String()
		if seen[name] || name == "" || name == "unknown" {
			t.Errorf("source %d has the name %q", s, name)
		}
		seen[name] = true
	}
	if got := stamp.Source(stamp.Sources).String(); got != "unknown" {
		t.Errorf("an undefined source is %q, want unknown", got)
	}
}
