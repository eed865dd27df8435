//go:build linux

package load

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Quantiles are exact quantiles of single messages, in microseconds.
type Quantiles struct {
	P50 float64 `json:"p50_us"`
	P99 float64 `json:"p99_us"`
	Max float64 `json:"max_us"`
}

func quantilesOf(d []time.Duration) *Quantiles {
	slices.Sort(d)
	us := func(q float64) float64 { return float64(Quantile(d, q)) / 1e3 }
	return &Quantiles{us(0.5), us(0.99), us(1)}
}

// Quantile returns the exact quantile of sorted values, or 0 without values.
func Quantile[T any](sorted []T, q float64) (v T) {
	if len(sorted) > 0 {
		v = sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
	}
	return v
}

// traceFile is the name of our broker's release trace.
const traceFile = "release.trace"

// readReleaseTrace reads access delays and times in the topic from our broker's release trace, for a
// sender that keeps its contract. The warm-up is left out.
func readReleaseTrace(at Place, s Scenario, r *Result) error {
	if s.Burst == 0 {
		return nil
	}
	f, err := os.Open(filepath.Join(at.Dir, traceFile))
	if err != nil {
		return err
	}
	defer f.Close()
	var all [][3]mono.Time // arrival, eligible, left the topic
	first := mono.Never
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var one [3]mono.Time
		fields := strings.Split(lines.Text(), ",")
		if len(fields) != 1+len(one) {
			return fmt.Errorf("release trace: cannot parse %q", lines.Text())
		}
		for i := range one {
			ns, err := strconv.ParseInt(fields[1+i], 10, 64)
			if err != nil {
				return fmt.Errorf("release trace: %w", err)
			}
			one[i] = mono.Time(ns)
		}
		all = append(all, one)
		first = min(first, one[0])
	}
	if len(all) != r.Sent {
		return fmt.Errorf("release trace: %d messages left the topic, but %d were sent", len(all), r.Sent)
	}
	var access, left []time.Duration
	for _, times := range all {
		if !times[0].Before(first.Add(Warming)) {
			access, left = append(access, times[1].Sub(times[0])), append(left, times[2].Sub(times[0]))
		}
	}
	r.Access, r.Left = quantilesOf(access), quantilesOf(left)
	return nil
}
