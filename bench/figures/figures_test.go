package figures

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/link"
	"github.com/srtm-io/srtm/tools/sim/scenario"
	"github.com/srtm-io/srtm/tools/srtm/up"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// makeFigures runs the command with small simulations, and returns the folder.
func makeFigures(t *testing.T, args ...string) (folder string) {
	t.Helper()
	folder = t.TempDir()
	var out, errs bytes.Buffer
	args = append([]string{"--out=" + folder, "--pages=", "--runs=1", "--seconds=0.2", "--bin-dir=" + t.TempDir(), "--traces=" + t.TempDir()}, args...)
	if err := Run(t.Context(), args, &out, &errs); err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	return folder
}

func read(t *testing.T, path string) string {
	t.Helper()
	b := testkit.Result(os.ReadFile(path)).Must(t)
	return string(b)
}

func TestTheSameSeedGivesTheSameFiles(t *testing.T) {
	a, b := makeFigures(t, "--only=6", "--seed=5", "--seconds=0.1"), makeFigures(t, "--only=6", "--seed=5", "--seconds=0.1")
	files := 0
	err := fs.WalkDir(os.DirFS(a), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		testkit.Equal(t, read(t, filepath.Join(a, path)), read(t, filepath.Join(b, path)), "%s differs", path)
		return nil
	})
	testkit.Must(t, err)
	if files != 5 {
		t.Errorf("%d files, want two plots with their tables, and the rows", files)
	}
	other := makeFigures(t, "--only=6", "--seed=6", "--seconds=0.1")
	if read(t, filepath.Join(a, "fig6a.csv")) == read(t, filepath.Join(other, "fig6a.csv")) {
		t.Error("seeds 5 and 6 gave the same")
	}
}

func TestAPlotShowsItsCurves(t *testing.T) {
	folder := makeFigures(t, "--only=6")
	svg := read(t, filepath.Join(folder, "fig6a.svg"))
	for _, want := range []string{"<svg", "Figure 6a: 1000 Poisson publishers", "99th of access delay", "SLO"} {
		if !strings.Contains(svg, want) {
			t.Errorf("no %q in the plot", want)
		}
	}
	rows := strings.Split(strings.TrimSpace(read(t, filepath.Join(folder, "fig6b.csv"))), "\n")
	if len(rows) != 1+brokers || !strings.HasPrefix(rows[0], "publishers,k,p50_ms") || !strings.HasPrefix(rows[6], "6000,6,") {
		t.Errorf("the table is\n%s", strings.Join(rows, "\n"))
	}
}

func TestDrawing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.svg")
	curve := series{name: "curve"}
	curve.add(1, 0, 0, "first")
	curve.add(1000, 20, 30, "last")
	p := panel{id: "p", title: "title", logX: true, logY: true, limit: 1, series: []series{curve}}
	// Neither 0 nor an error as large as its value can appear on such a scale.
	testkit.Must(t, p.draw(path))
	for _, want := range []string{"title", "first", "last", "curve", "SLO"} {
		if !strings.Contains(read(t, path), want) {
			t.Errorf("no %q in the plot", want)
		}
	}
	p.logX, p.logY = false, false
	testkit.Must(t, p.draw(path))
}

// Both searches, with groups and without, end in rows and curves for every point.
func TestSearchedFigures(t *testing.T) {
	folder := makeFigures(t, "--only=7,9", "--seconds=0.1")
	for file, rows := range map[string]int{"fig7a": 2 * len(sizes), "fig7d": 2 * len(sizes), "fig9a": 2 * len(groupSizes), "fig10b": 2 * len(groupSizes)} {
		if got := strings.Count(read(t, filepath.Join(folder, file+".csv")), "\n") - 1; got != rows {
			t.Errorf("%s has %d rows, want %d", file, got, rows)
		}
	}
	if text := read(t, filepath.Join(folder, "rows-9.csv")); strings.Count(text, "9(") != 4 || !strings.Contains(text, "30→") {
		t.Errorf("the rows are\n%s", text)
	}
}

func TestWhatCannotBeMadeSaysWhy(t *testing.T) {
	folder := makeFigures(t, "--only=traces,livetraces,live6,live8")
	for name, want := range map[string]string{
		"traces":     "not made: the recorded traffic is not there",
		"livetraces": "not made: the recorded traffic is not there",
		"live6":      "not made: there is no ",
		"live8":      "not made: there is no ",
	} {
		if text := read(t, filepath.Join(folder, "rows-"+name+".csv")); !strings.Contains(text, want) {
			t.Errorf("%s: %s, want %q", name, text, want)
		}
	}
}

// The website sketch of the paper suffices for the rows, with any seed.
func TestWebsiteFigures(t *testing.T) {
	folder := makeFigures(t, "--only=mqos6,mqos7,mqos8,mqos9-11", "--seconds=0.1", "--seed=3")
	for file, want := range map[string]string{
		"rows-mqos6": "\"94, 95, 97; 54, 55, 57\"", "rows-mqos7": "network by mQoS", "rows-mqos8": "+21 %", "rows-mqos9-11": "mQoS 11",
		"mqos7-sQoS": "class,cpu,cpu_sd,disk,disk_sd,network,network_sd", "mqos10": "literal,3,",
	} {
		if text := read(t, filepath.Join(folder, file+".csv")); !strings.Contains(text, want) {
			t.Errorf("%s: %s, want %q", file, text, want)
		}
	}
}

func TestUsage(t *testing.T) {
	for args, want := range map[string]string{
		"--only=5":       `no figure "5": there are 6, 7`,
		"--runs=0":       "runs: 0",
		"--seconds=0":    "seconds: 0",
		"here":           `unexpected argument "here"`,
		"--fly":          "flag provided but not defined",
		"--seconds=many": "invalid value",
	} {
		var out bytes.Buffer
		err := Run(t.Context(), []string{args}, &out, &out)
		if _, usage := errors.AsType[program.UsageError](err); !usage || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

func TestTablesOfPagesAreKeptUpToDate(t *testing.T) {
	folder := t.TempDir()
	page := filepath.Join(folder, "srtm.md")
	const head, tail = "# Title\n\ntext\n", "\nmore\n"
	testkit.Must(t, os.WriteFile(page, []byte(head+tableBegin+"\nold\n"+tableEnd+tail), 0o644))
	testkit.Must(t, writeRows(filepath.Join(folder, "rows-6.csv"), []row{{Figure: "6(a)", Quantity: "a|b", Paper: "14.7 ms", Simulated: "12 ms"}}))
	testkit.Must(t, updatePages(folder, folder))
	text := read(t, page)
	if !strings.HasPrefix(text, head) || !strings.HasSuffix(text, tail) || strings.Contains(text, "old") ||
		!strings.Contains(text, `| 6(a) | a\|b | 14.7 ms | 12 ms | – | – |`) {
		t.Errorf("the page is\n%s", text)
	}
	for _, broken := range []string{head, head + tableEnd + tableBegin} {
		testkit.Must(t, os.WriteFile(page, []byte(broken), 0o644))
		if err := updatePages(folder, folder); err == nil || read(t, page) != broken {
			t.Errorf("without a place for the table: %v, and the page is %q", err, read(t, page))
		}
	}
}

// The search picks the fewest brokers that meet the SLO. If no number of brokers meets it, the search
// picks the lowest p99.
func TestSearch(t *testing.T) {
	w := newHarness(t.Context(), options{seed: 1, runs: 1, seconds: 0.5}, "test", &bytes.Buffer{})
	tried := 0
	at := func(rate float64, contract scenario.Contract) func(k int) scenario.Scenario {
		tried = 0
		return func(k int) scenario.Scenario {
			tried++
			return w.scene(scenario.Topic{Load: scenario.Load{Publishers: 6000, Rate: rate}, Policy: placement.MaxMin, K: k, Contract: contract})
		}
	}
	// 120,000 msg/s are more than one broker of the model carries, and a generous bucket costs no
	// access delay.
	best, err := w.search(1, at(20, scenario.Contract{Rate: 200_000, Burst: 10_000}))
	if err != nil || best.k < 2 || !best.met() || tried != best.k {
		t.Errorf("k = %d, p99 %v of %d tried, %v", best.k, best.p99, tried, err)
	}
	// A bucket of 6 tokens misses the SLO everywhere, and by most where the bucket is split.
	best, err = w.search(1, at(1, scenario.Contract{Rate: 6200, Burst: 6}))
	if err != nil || best.k != 1 || best.met() || tried != brokers {
		t.Errorf("k = %d, p99 %v of %d tried, %v", best.k, best.p99, tried, err)
	}
}

// Whatever the rate, the mcap chosen for k brokers makes SRTM take k.
func TestMcapForTakesSoManyBrokers(t *testing.T) {
	w := newHarness(t.Context(), options{seed: 1}, "test", &bytes.Buffer{})
	rate, b, err := burst(w.fleet(schedule.Periodic, 10, 30).Spec.Stream(), 0.995)
	testkit.Must(t, err)
	for k := 1; k <= brokers; k++ {
		snapshot := make([]placement.Broker, brokers)
		for i := range snapshot {
			snapshot[i] = placement.Broker{ID: string(rune('a' + i)), Mcap: mcapFor(rate, k)}
		}
		plan, err := placement.Place(placement.SRTM, snapshot, placement.Demand{Topic: "t", RateMilli: int64(rate), Rate: (int64(rate) + 999) / 1000, Burst: b}, nil)
		if err != nil || plan.K != k {
			t.Errorf("k = %d: %d brokers, %v", k, plan.K, err)
		}
	}
}

// A live figure appears beside a simulation of the same schedule.
func TestLiveReadsTheClustersReport(t *testing.T) {
	phase := func(policy string, k int, us int64) up.Phase {
		q := report.Quantiles{Count: 100, P50Us: us / 2, P99Us: us}
		return up.Phase{
			Policy: policy, Placement: make([]up.Placed, k), Emulator: report.Report{Lateness: report.Quantiles{P99Us: 70}},
			Broker: &up.BrokerSide{Access: q, Processing: q, Delivery: q, ExceedFraction: 0.25},
		}
	}
	text, err := json.Marshal(up.Report{RateMilli: 1_100_000, Burst: 30, Phases: []up.Phase{phase("srtm", 1, 900), phase("loadbalance", 6, 45_000)}})
	testkit.Must(t, err)
	bin := t.TempDir()
	fake := func(script string) {
		testkit.Must(t, os.WriteFile(filepath.Join(bin, "srtm"), []byte("#!/bin/sh\n"+script), 0o755))
	}
	// The command exits with code 1 and a report if the load was not carried.
	fake("cat <<'EOF'\n" + string(text) + "\nEOF\nexit 1\n")
	w := newHarness(t.Context(), options{seed: 1, runs: 1, seconds: 1, bin: bin}, "live6", &bytes.Buffer{})
	testkit.Must(t, livePenalty(w))
	testkit.Equal(t, w.out.rows[0].Live, "45.0 ms", "live")
	if p := w.out.panels[0]; len(p.rows) != brokers || p.rows[0][2] != "45" || p.rows[0][5] != "0.25" || p.rows[0][6] != "0.07" {
		t.Errorf("the table is %v", p.rows)
	}
	// In the simulation, 100 publishers wait for tens of milliseconds when they are split over 6
	// brokers.
	if sim := w.out.panels[0].series[3]; sim.y[0] > 10 || sim.y[5] < 10 {
		t.Errorf("simulated access delays, ms: %v", sim.y)
	}
	fake("echo srtm: no broker came up >&2; exit 1\n")
	testkit.ErrorHas(t, livePenalty(w), "no broker came up", "without a report")
}

// Rows of live figures have means and standard deviations over runs; the CSV file has every run.
func TestLiveFiguresAreMadeSeveralTimes(t *testing.T) {
	f := figure{name: "x", live: true, make: func(w *harness) error {
		p := panel{id: "x", header: []string{"at", "y"}}
		p.point("curve", 7, float64(w.seed))
		p.add(7, w.seed)
		w.out.plot(p)
		w.out.tell(row{Quantity: "p99 over 6", Live: fmt.Sprintf("%.2f ms, 6", float64(w.seed)), Note: fmt.Sprintf("in %d", 98+w.seed)})
		return nil
	}}
	o := options{seed: 1, runs: 3}
	got := testkit.Result(f.run(t.Context(), o, &bytes.Buffer{})).Must(t)
	testkit.Equal(t, got.rows[0], row{Quantity: "p99 over 6", Live: "2.00 ± 1.00 ms, 6", Note: "in 100 ± 1"}, "seeds 1, 2 and 3")
	if p := got.panels[0]; !slices.EqualFunc(p.rows, [][]string{{"1", "7", "1"}, {"2", "7", "2"}, {"3", "7", "3"}}, slices.Equal) || p.series[0].y[0] != 2 || p.series[0].err[0] != 1 {
		t.Errorf("panel %+v", p)
	}
	fewer := f
	fewer.make = func(w *harness) error {
		if w.seed == 1 {
			w.out.tell(row{})
		}
		return nil
	}
	_, err := fewer.run(t.Context(), o, &bytes.Buffer{})
	testkit.ErrorHas(t, err, "run 2 has other rows", "a run without a row of the first")
	f.live = false
	testkit.Equal(t, testkit.Result(f.run(t.Context(), o, &bytes.Buffer{})).Must(t).rows[0].Live, "1.00 ms, 6", "simulated figures have their own seeds")
	testkit.Equal(t, overRuns([]string{"98.5 ms", "101 ms"}), "100 ± 2 ms", "the decimals of the largest")
	testkit.Equal(t, overRuns([]string{"5", "infeasible"}), "5; or infeasible", "other words")
}

// A sample comes a little after its second. The seconds of the last third count, from 25 s to 30 s.
func TestSettledTakesItsSeconds(t *testing.T) {
	r := new(paced)
	for i := range 45 {
		rates := []float64{4, 8, 16, 32, 40} // the parts of a hundred publishers
		switch second := i + 1; {
		case second == 25:
			rates[0] = 8 // before the last third
		case second == 30:
			rates[4] = 30
		}
		r.at, r.rates = append(r.at, float64(i+1)+0.0003), append(r.rates, rates)
	}
	worst, used := r.settled()
	testkit.Equal(t, worst, "5.0 %", "a second of five at three quarters")
	testkit.Equal(t, used, "0.980", "the part of the contract")
}

// The queue rises with flows that join, and is drained once it is as before, or almost empty.
func TestQueueDrainsAfterFlowsJoin(t *testing.T) {
	var r link.Result
	for i := range 120 {
		s := link.Sample{At: time.Duration(i+1) * 500 * time.Millisecond, Queue: 0.05, Utilization: 1, Throughput: []float64{6e6}}
		switch at := s.At.Seconds(); {
		case at == 20.5:
			s.Queue, s.Utilization = 0.4, 0.9
		case at == 21:
			s.Queue = 0.2
		case at == 21.5:
			s.Queue = 0.8
		case at == 22:
			s.Queue = 0.06
		case at == 25.5:
			s.Queue = 0.07
		}
		r.Series = append(r.Series, s)
	}
	got := suddenlyOf([]link.Result{r})
	want := suddenly{settled: spread{mean: 1}, lowest: spread{mean: 0.9}, before: spread{mean: 0.05}, peak: spread{mean: 0.8}, drained: spread{mean: 2.5}, later: spread{mean: 0.07}, drains: 1, runs: 1}
	testkit.Equal(t, got, want, "0.06 is more than 1.1 times the queue before")
	testkit.Equal(t, got.drainedText(), "2.50 ± 0.00", "one run, which drained")

	long := link.Result{Series: slices.Clone(r.Series)}
	for i := range long.Series {
		if at := long.Series[i].At.Seconds(); at >= 20 && at <= 40 {
			long.Series[i].Queue = 0.3
		}
	}
	testkit.Equal(t, suddenlyOf([]link.Result{long}).drainedText(), "not in 20 s", "a queue that stays")
	testkit.Equal(t, suddenlyOf([]link.Result{r, long}).drainedText(), "2.50 ± 0.00 in 1 of 2 runs, not in 20 s in the others", "one of two runs")
}

// The paper's transport: the listing of a sweep, and its panels.
func TestSweepOfTransport(t *testing.T) {
	w := newHarness(t.Context(), options{seed: 1, runs: 2, seconds: 1}, "iefxcp3", &bytes.Buffer{})
	by, err := w.sweep(sweep{figure: "3", title: "test", xLabel: "Mb/s", xs: []float64{5, 10}, queues: []queueOverTime{{"d", 10}}, change: func(c *link.Config, x float64) {
		c.Capacity, c.Flows, c.RTT, c.Duration = x*1e6, 5, 20*time.Millisecond, 3*time.Second
	}})
	testkit.Must(t, err)
	for _, rules := range allRules {
		got := by[rules.name]
		if len(got) != 2 || got[1].ratios[4].mean < 5*got[1].ratios[0].mean || got[1].utilization.mean < 0.8 || got[1].utilization.sd == 0 {
			t.Errorf("%s: %+v", rules.name, got)
		}
	}
	if len(w.out.panels) != 4 || len(w.out.panels[0].rows) != 8 || len(w.out.panels[3].series) != 4 {
		t.Errorf("panels %+v", w.out.panels)
	}
	for _, p := range w.out.panels {
		testkit.Equal(t, len(p.rows[0]), len(p.header), "columns of %s", p.id)
	}
	for _, r := range w.out.rows {
		testkit.Equal(t, strings.Count(r.Simulated, ";"), 3, "row %+v", r)
	}
}
