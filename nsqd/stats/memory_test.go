package stats

import (
	"runtime"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestPercentiles(t *testing.T) {
	upTo := func(n int) (s []uint64) {
		for i := range n {
			s = append(s, uint64(i+1))
		}
		return s
	}
	for _, c := range []struct {
		n, percent int
		want       uint64
	}{
		{0, 99, 0}, {1, 95, 1}, {1, 100, 1}, {100, 95, 95}, {100, 99, 99}, {100, 100, 100}, {256, 95, 244}, {20, 95, 19}, {20, 99, 20},
	} {
		testkit.Equal(t, percentile(upTo(c.n), c.percent), c.want, "%d %% of 1..%d", c.percent, c.n)
	}
}

func TestPausesAreThoseOfCollectionsThatWere(t *testing.T) {
	m := runtime.MemStats{NumGC: 3}
	m.PauseNs[0], m.PauseNs[1], m.PauseNs[2] = 5_000, 1_000, 9_999
	m.PauseNs[3] = 1_000_000 // no value yet
	if s := memoryOf(&m); s.GCPauseUsec100 != 9 || s.GCTotalRuns != 3 {
		t.Errorf("%+v", s)
	}
	m.NumGC = 1000 // the last 256 values are kept
	if s := memoryOf(&m); s.GCPauseUsec100 != 1000 {
		t.Errorf("%+v", s)
	}
	if s := ReadMemory(); s.HeapInUseBytes == 0 || s.NextGCBytes == 0 || s.HeapObjects == 0 {
		t.Errorf("%+v", s)
	}
}
