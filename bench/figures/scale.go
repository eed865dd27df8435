package main

import (
	"fmt"
	"runtime"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tools/sim/scale"
)

// scaleStudy is what drlsim scale measures, in four sizes.
func scaleStudy(w *workshop) (*work, error) {
	var reports []scale.Report
	for _, size := range []scale.Size{
		{Brokers: 1, Topics: 100, Publishers: 10_000}, {Brokers: 10, Topics: 1000, Publishers: 100_000},
		{Brokers: 100, Topics: 10_000, Publishers: 1_000_000}, {Brokers: 1000, Topics: 100_000, Publishers: 10_000_000},
	} {
		if err := w.Err(); err != nil {
			return nil, err
		}
		began := time.Now()
		r, err := scale.Run(scale.Config{
			Size: size, Policy: placement.SRTM, Rule: share.Proportional, Mcap: 64_000, Load: 0.7, GroupSize: 25, Ticks: 5, Seed: w.seed,
		}, scale.Meter{
			Now: func() mono.Time { return mono.Time(time.Since(began)) },
			Heap: func() uint64 {
				var m runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&m)
				return m.HeapAlloc
			},
			Progress: func(stage string, done, total int) { w.stage(stage, done, total) },
		})
		if err != nil {
			return nil, err
		}
		reports = append(reports, r)
	}
	times := panel{
		id: "scale-time", title: "The control plane's own cost", xLabel: "brokers (100 topics, 10,000 publishers each)", yLabel: "time, ms", logX: true, logY: true,
		header: []string{
			"brokers", "topics", "publishers", "widest", "place_p50_us", "place_max_us", "commit_p50_us", "grant_p50_us", "resolve_p50_us",
			"retune_all_p50_us", "rejoin_p50_us", "all_up_s", "catalog_bytes", "ledger_bytes", "messages_per_topic", "reports_per_s", "report_lines_per_s", "retuning_per_s",
		},
	}
	place, worst, rejoin, retune := series{name: "place a topic, median"}, series{name: "place the largest topic"}, series{name: "a broker comes back"}, series{name: "retune all shares"}
	for _, r := range reports {
		us := func(d time.Duration) string { return number(float64(d) / 1e3) }
		up := (r.Place.Total + r.Commit.Total + r.Grant.Total).Seconds()
		times.rows = append(times.rows, []string{
			strconv.Itoa(r.Brokers), strconv.Itoa(r.Topics), strconv.Itoa(r.Publishers), strconv.Itoa(r.Widest),
			us(r.Place.P50), us(r.Place.Max), us(r.Commit.P50), us(r.Grant.P50), us(r.Resolve.P50), us(r.Tick.P50), us(r.Rejoin.P50),
			number(up), strconv.FormatUint(r.CatalogBytes, 10), strconv.FormatUint(r.LedgerBytes, 10),
			number(r.Messages.PerTopic), number(r.Messages.ReportsPerSecond), number(r.Messages.EntriesPerSecond), number(r.Messages.GrantsPerSecond),
		})
		x := float64(r.Brokers)
		milli := func(d time.Duration) float64 { return float64(d) / 1e6 }
		place.add(x, milli(r.Place.P50), 0, "")
		worst.add(x, milli(r.Place.Max), 0, "")
		rejoin.add(x, milli(r.Rejoin.P50), 0, "")
		retune.add(x, milli(r.Tick.P50), 0, "")
	}
	times.series = []series{place, worst, rejoin, retune}
	last := reports[len(reports)-1]
	return &work{panels: []panel{times}, rows: []row{{
		Figure: "scale", Quantity: "1,000 brokers, 100,000 topics, 10,000,000 publishers",
		Simulated: fmt.Sprintf("all placed in %.0f s, %.2f GB, %.0f gRPC messages/s", (last.Place.Total + last.Commit.Total + last.Grant.Total).Seconds(),
			float64(last.CatalogBytes+last.LedgerBytes)/1e9, last.Messages.PerSecond()),
		Note: fmt.Sprintf("a topic: %s to place (median), %s the largest, over %d brokers", ms(float64(last.Place.P50)/1e6), ms(float64(last.Place.Max)/1e6), last.Widest),
	}}}, nil
}

// stage shows progress now and then.
func (w *workshop) stage(stage string, done, total int) {
	if now := time.Now(); now.Sub(w.shown) >= 2*time.Second {
		w.shown = now
		fmt.Fprintf(w.stderr, "%s: %s, %d of %d\n", w.name, stage, done, total)
	}
}
