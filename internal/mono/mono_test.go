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

func TestWhatWasSaidBefore(t *testing.T) {
	type said = mono.Said
	for name, c := range map[string]struct {
		a, b   said
		before bool
	}{
		"earlier in one process":                    {said{"p", 5, 1}, said{"p", 5, 2}, true},
		"at once in one process":                    {said{"p", 5, 2}, said{"p", 5, 2}, false},
		"one process that says no times":            {said{"p", 0, 0}, said{"p", 0, 0}, false},
		"in a process that began before":            {said{"p", 5, 9}, said{"q", 6, 1}, true},
		"in a process that began after":             {said{"p", 6, 1}, said{"q", 5, 9}, false},
		"in processes that began at once":           {said{"p", 5, 1}, said{"q", 5, 2}, false},
		"in a process of which that is not known":   {said{"p", 0, 1}, said{"q", 5, 2}, false},
		"before a process of which it is not known": {said{"p", 5, 1}, said{"q", 0, 2}, false},
	} {
		if got := c.a.Before(c.b); got != c.before {
			t.Errorf("%s: %v", name, got)
		}
		if c.before && c.b.Before(c.a) {
			t.Errorf("%s: and after it", name)
		}
	}
}
