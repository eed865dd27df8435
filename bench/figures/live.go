package figures

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/engine"
	"github.com/srtm-io/srtm/tools/sim/scenario"
	"github.com/srtm-io/srtm/tools/srtm/up"
)

// Live measurements use a tenth of the paper's publishers, since six brokers, the
// publishers and the subscriber share this machine's processors.
const (
	tenth      = 100
	livePhase  = 8 * time.Second
	liveLimit  = 2 * time.Minute // for one run, with start and end
	liveFigure = ", 1/10"
)

// fleet describes the publishers of a live topic.
func (w *harness) fleet(process schedule.Process, batch, group int) load.Options {
	o := load.Default()
	o.Spec = schedule.Spec{
		Publishers: tenth, Rate: perPublisher, Batch: batch, Process: process, GroupSize: group, Sync: group > 1, Size: 100, Seed: w.seed,
	}
	return o
}

// burst profiles b like the paper: r is 1.1 times the mean rate, and the SLO's quantile of
// the access delay is 0 for the schedule to be sent.
func burst(s schedule.Stream, quantile float64) (rate tokenbucket.Rate, b int64, err error) {
	arrivals := schedule.Arrivals(schedule.Until(s, livePhase))
	rate = tokenbucket.PerSecond(1.1 * float64(len(arrivals)) / livePhase.Seconds())
	b, err = tokenbucket.Profile(arrivals, rate, quantile)
	return rate, b, err
}

// binary returns the path of one of the project's programs.
func (w *harness) binary(name string) (string, error) {
	path, err := filepath.Abs(filepath.Join(w.bin, name))
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(path); err != nil {
		return "", impossible{fmt.Sprintf("there is no %s: run make build", filepath.Join(w.bin, name))}
	}
	return path, nil
}

// serve serves HTTP at a loopback address until stop is called.
func (w *harness) serve(handler http.Handler) (at string, stop func(), err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	ctx, end := context.WithCancel(w)
	done, serve := make(chan struct{}), lifecycle.Serve(ln, &http.Server{Handler: handler})
	go func() {
		defer close(done)
		_ = serve(ctx) // clients notice a failure
	}()
	return ln.Addr().String(), func() { end(); <-done }, nil
}

// output runs one of our programs to the end, and returns its output, even after a failure.
func output(ctx context.Context, path string, args ...string) ([]byte, error) {
	var out bytes.Buffer
	p, err := local.Start(path, args, local.Options{Stdout: &out, Within: 10 * time.Second})
	if err != nil {
		return nil, err
	}
	select {
	case <-p.Done():
		return out.Bytes(), p.Failure()
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), p.Stop())
	}
}

// runUp runs a topic on the k brokers that SRTM chooses with the given mcap, then blindly on all
// brokers. b is the contract's burst. Exit code 1 with a report means that the brokers could not
// carry the load; the report contains this result.
func (w *harness) runUp(o load.Options, all int, mcap, b int64) (*up.Report, error) {
	path, err := w.binary("srtm")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(w, liveLimit)
	defer cancel()
	out, err := output(ctx, path, append([]string{
		"up", "--output=json", "--calibration=0s", "--slo=" + time.Duration(sloMs*float64(time.Millisecond)).String(), "--brokers=" + strconv.Itoa(all), "--duration=" + (2 * livePhase).String(),
		"--mcap=" + strconv.FormatInt(mcap, 10), "--burst=" + strconv.FormatInt(b, 10),
	}, o.Args()...)...)
	var r up.Report
	if json.Unmarshal(out, &r) != nil || len(r.Phases) != 2 || r.Phases[0].Broker == nil || r.Phases[1].Broker == nil {
		return nil, fmt.Errorf("srtm up: %w", cmp.Or(err, errors.New("no report of two phases")))
	}
	return &r, nil
}

// measured holds the broker's metrics of a phase, in ms.
type measured struct {
	k                            int
	p50, p99, access, processing float64
	late, sentLate               float64
	met                          bool
}

func measure(p *up.Phase) measured {
	us := func(v int64) float64 { return float64(v) / 1000 }
	b := p.Broker
	return measured{
		k: len(p.Placement), p50: us(b.Delivery.P50Us), p99: us(b.Delivery.P99Us), access: us(b.Access.P99Us), processing: us(b.Processing.P99Us),
		late: b.ExceedFraction, sentLate: us(p.Emulator.Lateness.P99Us), met: b.Delivery.P99Us <= sloMs*1000,
	}
}

var liveColumns = []string{"k", "p50_ms", "p99_ms", "access_p99_ms", "processing_p99_ms", "late_fraction", "sent_late_p99_ms", "simulated_p99_ms", "simulated_access_p99_ms"}

// replay simulates a live run: the same schedule and contract on the same number of simulated
// brokers. Blind placements differ from run to run, both live and simulated.
func (w *harness) replay(o load.Options, r *up.Report, policy string, k int) (*outcome, error) {
	calibration, err := scenario.ReadCalibration(scenario.Paper)
	if err != nil {
		return nil, err
	}
	model, _, err := calibration.Model("")
	if err != nil {
		return nil, err
	}
	l, err := o.Build()
	if err != nil {
		return nil, err
	}
	demand := placement.Demand{Topic: "t", RateMilli: r.RateMilli, Rate: (r.RateMilli + 999) / 1000, Burst: r.Burst, AtLeast: k}
	// The mean rate of a schedule can exceed the contract, which covers the beginning.
	scale := min(1, float64(r.RateMilli)/1000/l.Rate())
	for _, s := range l.Sources {
		demand.Publishers = append(demand.Publishers, placement.Publisher{ID: s.ID, Key: s.Key, Rate: s.Rate * scale, Batch: s.Batch})
	}
	var snapshot []placement.Broker
	for i := range k {
		snapshot = append(snapshot, placement.Broker{ID: fmt.Sprintf("b%d", i+1), Mcap: demand.Rate})
	}
	var p50, p99, access []float64
	for i := range w.runs {
		plan, err := placement.Place(policy, snapshot, demand, rand.New(rand.NewPCG(w.seed, uint64(i))))
		if err != nil {
			return nil, err
		}
		where, shares := scenario.Layout(plan, snapshot, len(l.Sources))
		delivery, waits := histogram.NewLatency(), histogram.NewLatency()
		cluster, err := engine.New(slices.Repeat([]engine.Model{model}, k), []engine.Topic{{
			Stream: schedule.Until(l.Stream(), livePhase), Where: where, Limited: true, Shares: shares,
		}}, w.seed+uint64(i), func(d engine.Delivery) {
			delivery.Record(d.Latency())
			waits.Record(d.Access())
		})
		if err != nil {
			return nil, err
		}
		cluster.Advance(mono.Time(10 * livePhase)) // includes the messages that wait for tokens at the end
		p50, p99, access = append(p50, millis(delivery.Quantile(0.5))), append(p99, millis(delivery.Quantile(0.99))), append(access, millis(waits.Quantile(0.99)))
	}
	return &outcome{k: k, runs: w.runs, p50: spreadOf(p50), p99: spreadOf(p99), access: spreadOf(access)}, nil
}

// mcapFor returns an mcap for which SRTM chooses k brokers at the given rate.
func mcapFor(rate tokenbucket.Rate, k int) int64 {
	return int64(math.Ceil(rate.PerSecond() / (float64(k) - 0.5)))
}

// side is a phase of a run with its simulation.
type side struct {
	live measured
	sim  *outcome
}

// cells returns the cells of liveColumns.
func (s side) cells() []string {
	m := s.live
	return cells(m.k, m.p50, m.p99, m.access, m.processing, m.late, m.sentLate, s.sim.p99.mean, s.sim.access.mean)
}

// runBoth runs a topic on the brokers that SRTM chooses by mcap, and then on all brokers. It
// simulates both phases with the given policies.
func (w *harness) runBoth(o load.Options, all int, mcap, b int64, few, spread string) (chosen, blind side, r *up.Report, err error) {
	if r, err = w.runUp(o, all, mcap, b); err != nil {
		return chosen, blind, nil, err
	}
	chosen.live, blind.live = measure(&r.Phases[0]), measure(&r.Phases[1])
	if chosen.sim, err = w.replay(o, r, few, min(chosen.live.k, all)); err != nil {
		return chosen, blind, nil, err
	}
	blind.sim, err = w.replay(o, r, spread, all)
	return chosen, blind, r, err
}

// comparison is a row with the p99 of both sides, simulated and live.
func comparison(figure, quantity, note string, a, b side) row {
	return row{Figure: figure, Quantity: quantity, Simulated: pair(a.sim.p99.mean, b.sim.p99.mean), Live: pair(a.live.p99, b.live.p99), Note: note}
}

// pair formats two numbers in a cell.
func pair(a, b float64) string { return ms(a) + ", " + ms(b) }

// livePenalty makes figure 6(a) live: the topic split over k brokers.
func livePenalty(w *harness) error {
	o := w.fleet(schedule.Poisson, 1, 0)
	rate, b, err := burst(o.Spec.Stream(), 0.99)
	if err != nil {
		return err
	}
	p := latencies("live6a", "Figure 6(a) live, 1/10 of the publishers", "brokers")
	p.yLabel, p.header = "p99, ms", liveColumns
	var first, last side
	for k := 1; k <= brokers; k++ {
		w.progress("brokers", k, brokers)
		if _, last, _, err = w.runBoth(o, k, mcapFor(rate, 1), b, placement.SRTM, placement.MaxMin); err != nil {
			return err
		}
		p.add(last.cells())
		p.point("delivery, live", float64(k), last.live.p99)
		p.point("delivery, simulated", float64(k), last.sim.p99.mean)
		p.point("access, live", float64(k), last.live.access)
		p.point("access, simulated", float64(k), last.sim.access.mean)
		if k == 1 {
			first = last
		}
	}
	w.out.plot(p)
	w.out.tell(row{
		Figure: "6(a)" + liveFigure, Quantity: "p99 of 100 publishers over k = 6 brokers", Simulated: ms(last.sim.p99.mean), Live: ms(last.live.p99),
		Note: fmt.Sprintf("a token takes ten times as long as at full size; k = 1 live: %s", ms(first.live.p99)),
	})
	return nil
}

// liveConcentration makes the left end of figure 7 live: one broker (Conc) and six (LB).
func liveConcentration(w *harness) error {
	p := panel{id: "live7", header: append([]string{"panel", "process", "batch", "policy"}, liveColumns...)}
	for i, pr := range profiles {
		w.progress("profiles", i+1, len(profiles))
		o := w.fleet(pr.process, pr.batch, 0)
		rate, b, err := burst(o.Spec.Stream(), 0.99)
		if err != nil {
			return err
		}
		conc, lb, _, err := w.runBoth(o, brokers, mcapFor(rate, 1), max(b, brokers), placement.Conc, placement.LoadBalance)
		if err != nil {
			return err
		}
		p.add(pr.panel, pr.process, pr.batch, "conc", conc.cells())
		p.add(pr.panel, pr.process, pr.batch, "loadbalance", lb.cells())
		w.out.tell(comparison(fmt.Sprintf("7(%s)%s", pr.panel, liveFigure), fmt.Sprintf("p99 of 100 publishers, %s, batch %d: Conc, LB", pr.process, pr.batch), "", conc, lb))
	}
	w.out.plot(p)
	return nil
}

// liveCorrelation makes figure 10(b) live: synchronised groups on the same brokers, with
// SRTM's placement and with a blind placement.
func liveCorrelation(w *harness) error {
	p := latencies("live10b", "Figure 10(b) live, 1/10 of the publishers", "publishers in a group")
	p.header = append([]string{"group_size", "policy"}, liveColumns...)
	p.series = []series{{name: "SRTM, live"}, {name: "SRTM, simulated"}, {name: "blind, live"}, {name: "blind, simulated"}}
	var last row
	for i, g := range groupSizes {
		w.progress("group sizes", i+1, len(groupSizes))
		o := w.fleet(schedule.Periodic, 10, int(g))
		rate, b, err := burst(o.Spec.Stream(), marginQuantile)
		if err != nil {
			return err
		}
		k := table1[g].k
		srtm, blind, _, err := w.runBoth(o, k, mcapFor(rate, k), b, placement.SRTM, placement.MaxMin)
		if err != nil {
			return err
		}
		p.add(g, "srtm", srtm.cells())
		p.add(g, "blind", blind.cells())
		for j, y := range []float64{srtm.live.p99, srtm.sim.p99.mean, blind.live.p99, blind.sim.p99.mean} {
			p.series[j].add(g, y, 0, strconv.Itoa(k))
		}
		last = comparison("10(b)"+liveFigure, fmt.Sprintf("p99 at group size %.0f over %d brokers: SRTM, blind", g, k),
			"access delay alone, live: "+pair(srtm.live.access, blind.live.access), srtm, blind)
	}
	for j := range p.series[1:] {
		p.series[j+1].labels = nil // the same k as SRTM's labels
	}
	w.out.plot(p)
	w.out.tell(last)
	return nil
}

// liveTraces replays a tenth of the simulated recorded traffic, with SRTM's placement on
// six brokers and with a blind placement.
func liveTraces(w *harness) error {
	p := panel{id: "livetraces", header: append([]string{"trace", "policy"}, liveColumns...)}
	for i, t := range recorded {
		w.progress("recordings", i+1, len(recorded))
		file, err := w.path(t)
		if err != nil {
			return err
		}
		o := load.Default()
		o.Trace, o.Spec.Seed = file, w.seed
		o.Replay.Compress, o.Replay.Copies = t.compress, max(1, t.copies/10)
		o.Replay.From = time.Duration(t.from * float64(time.Second))
		o.Replay.To = o.Replay.From + time.Duration(t.compress*float64(livePhase+2*time.Second))
		l, err := o.Build()
		if err != nil {
			return err
		}
		_, b, err := burst(l.Stream(), 0.99)
		if err != nil {
			return err
		}
		b = max(brokers, (5*b+3)/4) // a quarter more than profiled, since the schedule varies
		srtm, blind, r, err := w.runBoth(o, brokers, mcapFor(tokenbucket.PerSecond(1.1*l.Rate()), brokers), b, placement.SRTM, placement.MaxMin)
		if err != nil {
			return err
		}
		p.add(t.id, "srtm", srtm.cells())
		p.add(t.id, "blind", blind.cells())
		w.out.tell(comparison("recorded: "+t.id+", 1/10", fmt.Sprintf("p99 over %d and %d brokers: SRTM, blind", srtm.live.k, blind.live.k),
			fmt.Sprintf("%.0f msg/s, b = %d, a quarter more than profiled", l.Rate(), r.Burst), srtm, blind))
	}
	w.out.plot(p)
	return nil
}

// fortieth is the scale of the live figure 8.
const fortieth = 40

// liveMaxMin makes figure 8(a) live for 8,000 publishers on three brokers. Conc and Max-Min
// place the topic by the paper's mcap. Each broker gets its background load and its limit.
func liveMaxMin(w *harness) error {
	p := panel{id: "live8a", header: []string{"policy", "broker", "publishers", "background", "p50_ms", "p99_ms", "sent_late_p99_ms", "simulated_p99_ms"}}
	worst := map[string][2]string{}
	for i, policy := range []string{placement.Conc, placement.MaxMin} {
		w.progress("policies", i+1, 2)
		topic := scenario.Topic{Load: scenario.Load{Publishers: 8000 / fortieth, Rate: perPublisher, Batch: 1}, Policy: policy}
		s := w.loaded(topic, mcaps[1])
		for j := range s.Brokers {
			b := &s.Brokers[j]
			b.Mcap /= fortieth
			b.Allocated /= fortieth
			b.Background.Publishers /= fortieth
		}
		sim, err := w.repeat(s)
		if err != nil {
			return err
		}
		s.Seed = w.seed
		built, err := scenario.New(s)
		if err != nil {
			return err
		}
		reports, err := w.standalone(built)
		if err != nil {
			return err
		}
		for j, q := range built.Topics[0].Plan.Quotas {
			r := reports[j]
			late := float64(r.EndToEnd.P99Us) / 1000
			p.add(policy, q.Broker, len(q.Publishers), r.Background.Publishers, float64(r.EndToEnd.P50Us)/1000, late,
				float64(r.Lateness.P99Us)/1000, sim.parts[q.Broker].mean)
			if q.Broker == "b3" {
				worst[policy] = [2]string{ms(sim.parts[q.Broker].mean), ms(late)}
			}
		}
	}
	c, m := worst[placement.Conc], worst[placement.MaxMin]
	w.out.plot(p)
	w.out.tell(row{
		Figure: "8(a), 1/40", Quantity: "p99 on broker 3, 200 publishers: Conc, Max-Min", Simulated: c[0] + ", " + m[0], Live: c[1] + ", " + m[1],
		Note: "a token takes 40 times as long as at full size",
	})
	return nil
}

// standalone runs a broker and a fleet for each quota of a plan in parallel, and returns
// the fleets' reports.
func (w *harness) standalone(b *scenario.Built) (reports []report.Report, err error) {
	nsqd, err := w.binary("nsqd")
	if err != nil {
		return nil, err
	}
	iotpub, err := w.binary("iotpub")
	if err != nil {
		return nil, err
	}
	data, err := os.MkdirTemp("", "figures")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(data)) }()
	ctx, cancel := context.WithTimeout(w, liveLimit)
	defer cancel()
	quotas := b.Topics[0].Plan.Quotas
	fleets := make([][]string, len(quotas))
	for i, q := range quotas {
		folder := filepath.Join(data, q.Broker)
		if err := os.Mkdir(folder, 0o755); err != nil {
			return nil, err
		}
		d, err := local.NSQD(nsqd, folder, "--log-level=error", "--mem-queue-size=100000",
			fmt.Sprintf("--topic-limit=t:%s:%d", strconv.FormatFloat(q.Share.Rate.PerSecond(), 'f', 3, 64), q.Share.Burst))
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, d.Stop()) }()
		at := slices.IndexFunc(b.Scenario.Brokers, func(spec scenario.Broker) bool { return spec.ID == q.Broker })
		fleets[i] = []string{
			"run", "--nsqd-tcp-address=" + d.TCP, "--topic=t", "--publishers=" + strconv.Itoa(len(q.Publishers)), "--rate=" + number(perPublisher),
			"--duration=" + livePhase.String(), "--subscribe", "--progress=0", "--output=json", "--seed=" + strconv.FormatUint(w.seed+uint64(i), 10),
			fmt.Sprintf("--background=%s=%d", d.TCP, b.Scenario.Brokers[at].Background.Publishers),
		}
	}
	reports = make([]report.Report, len(fleets))
	errs := make([]error, len(fleets))
	var all sync.WaitGroup
	for i, args := range fleets {
		all.Go(func() {
			out, err := output(ctx, iotpub, args...)
			if err == nil {
				err = json.Unmarshal(out, &reports[i])
			}
			errs[i] = err
		})
	}
	all.Wait()
	return reports, errors.Join(errs...)
}
