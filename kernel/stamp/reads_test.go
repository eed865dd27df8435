package stamp_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/stamp"
)

func TestReadsKnowNothingBeforeTheFirst(t *testing.T) {
	var r stamp.Reads[mono.Time]
	if at, ok := r.At(0); ok {
		t.Errorf("At(0) = %d before any read", at)
	}
	testkit.Equal(t, r.End(), 0, "End() before any read")
}

// The slow, obvious version keeps every read. For a forgotten read the real version may answer late, never early. For
// the last four reads the answer is exact.
func TestReadsAgreeWithAFullHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type read struct {
			end int64
			at  mono.Time
		}
		var all []read
		var r stamp.Reads[mono.Time]
		var end int64
		var now mono.Time
		for range rapid.IntRange(1, 12).Draw(t, "reads") {
			end += rapid.Int64Range(1, 9).Draw(t, "size")
			now += mono.Time(rapid.IntRange(0, 5).Draw(t, "pause"))
			r.Note(end, now)
			all = append(all, read{end, now})
		}
		testkit.MustEqual(t, r.End(), end, "End()")
		if _, ok := r.At(end); ok {
			t.Fatalf("At(%d) known, but only %d bytes were read", end, end)
		}
		for off := range end {
			i := 0
			for all[i].end <= off {
				i++
			}
			want := all[max(i, len(all)-4)].at
			if got, ok := r.At(off); !ok || got != want {
				t.Fatalf("At(%d) = %d, %v, want %d (reads %v)", off, got, ok, want, all)
			}
			known := i > 0 && i-1 >= len(all)-4
			if got, ok := r.Before(off); ok != known || ok && got != all[i-1].at {
				t.Fatalf("Before(%d) = %d, %v, known %v (reads %v)", off, got, ok, known, all)
			}
		}
	})
}
