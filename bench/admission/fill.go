package admission

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/bench/host"
)

// askers is the number of concurrent requests that fill a server. All keys begin in the
// store.
const askers = 32

// fill requests n new keys over UDP as fast as the server loads them, for at most limit. In
// parallel and afterwards, fill requests a thousand known keys at a steady rate. It prints
// a line per measurement.
func fill(ctx context.Context, out io.Writer, bin, dir string, n int64, l decide.Load, limit time.Duration) error {
	udp, web, err := decide.Admission(ctx, bin, dir, decide.Generous(), "--udp-loops=1", "--attempts=1000", fmt.Sprintf("--max-keys=%d", n+n/20+10_000))
	if err != nil {
		return err
	}
	defer udp.Stop()
	c, err := client.New(client.Config{Servers: []string{udp.At}, Attempts: 1000})
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := decide.UDP(udp, l, false); err != nil { // loads the thousand keys
		return err
	}
	empty, err := decide.UDP(udp, l, false)
	if err != nil {
		return err
	}
	host.Head(out, "seconds", "keys", "RSS MB", "bytes a key", "p50 us", "p99 us", "p99.9 us", "collections", "longest pause ms", "check-point s ago", "admission.db MB")
	start := time.Now()
	report := func(r decide.Result) (keys float64, err error) {
		values, err := host.Metrics(ctx, web.At)
		if err != nil {
			return 0, err
		}
		var disk int64
		if files, _ := filepath.Glob(filepath.Join(dir, "admission.db*")); files != nil {
			for _, f := range files {
				if info, err := os.Stat(f); err == nil {
					disk += info.Size()
				}
			}
		}
		keys = values["srtm_admission_keys"]
		host.Rowf(out, "%.0f\t%.0f\t%d\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.2f\t%.1f\t%d", time.Since(start).Seconds(), keys, r.RSS>>20, float64(r.RSS-empty.RSS)/max(1, keys-1000),
			us(r.Latency.Quantile(.5)), us(r.Latency.Quantile(.99)), us(r.Latency.Quantile(.999)), values["go_gc_duration_seconds_count"],
			1e3*values[`go_gc_duration_seconds{quantile="1"}`], values["srtm_admission_checkpoint_age_seconds"], disk>>20)
		return keys, nil
	}
	if _, err := report(empty); err != nil {
		return err
	}
	filling, stop := context.WithTimeout(ctx, limit)
	defer stop()
	var next atomic.Int64
	var asking sync.WaitGroup
	for range askers {
		asking.Go(func() {
			for i := next.Add(1); i <= n && filling.Err() == nil; {
				if d := c.Ask(filling, fmt.Sprintf("fill/%09d", i), 1); !d.Unanswered {
					i = next.Add(1)
				}
			}
		})
	}
	defer asking.Wait()
	defer stop()
	for after := 0; after < 3 && ctx.Err() == nil; {
		if next.Load() > n || filling.Err() != nil {
			after++
		}
		r, err := decide.UDP(udp, l, false)
		if err == nil {
			_, err = report(r)
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}
