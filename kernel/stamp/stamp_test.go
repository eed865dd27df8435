package stamp_test

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
)

func TestSourceNamesAreDistinct(t *testing.T) {
	seen := map[string]bool{}
	for s := range stamp.Sources {
		name := stamp.Source(s).String()
		if seen[name] || name == "" || name == "unknown" {
			t.Errorf("source %d has the name %q", s, name)
		}
		seen[name] = true
	}
	testkit.Equal(t, stamp.Source(stamp.Sources).String(), "unknown", "an undefined source")
}
