package main

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
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/sim/engine"
	"github.com/srtm-io/srtm/tools/sim/scenario"
	"github.com/srtm-io/srtm/tools/srtm/up"
)

// What is measured live has a tenth of the paper's publishers: six brokers, the
// publishers and the subscriber share this machine's processors.
const (
	tenth      = 100
	livePhase  = 8 * time.Second
	liveLimit  = 2 * time.Minute // for one run, its start and its end
	liveFigure = ", 1/10"
)

// fleet is a live topic's publishers.
func (w *workshop) fleet(process schedule.Process, batch, group int) load.Options {
	o := load.Default()
	o.Spec = schedule.Spec{
		Publishers: tenth, Rate: perPublisher, Batch: batch, Process: process, GroupSize: group, Sync: group > 1, Size: 100, Seed: w.seed,
	}
	return o
}

// burst profiles b as the paper does: r is 1.1 times the mean rate, and the
// SLO's quantile of the access delay is 0 on the schedule that will be sent.
func burst(s schedule.Stream, quantile float64) (rate tokenbucket.Rate, b int64, err error) {
	var arrivals []mono.Time
	for _, at := range schedule.Arrivals(schedule.Until(s, livePhase)) {
		arrivals = append(arrivals, mono.Time(at))
	}
	rate = tokenbucket.PerSecond(1.1 * float64(len(arrivals)) / livePhase.Seconds())
	b, err = tokenbucket.Profile(arrivals, rate, quantile)
	return rate, b, err
}

// binary is the path of one of the project's programs.
func (w *workshop) binary(name string) (string, error) {
	path, err := filepath.Abs(filepath.Join(w.bin, name))
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(path); err != nil {
		return "", impossible{fmt.Sprintf("there is no %s: run make build", filepath.Join(w.bin, name))}
	}
	return path, nil
}

// command is a program that ends with ctx, by SIGTERM first.
func command(ctx context.Context, path string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// A run in which the emulator itself was later than maxLateUs at p99 says more of
// this machine than of the brokers: it is made again, liveAttempts times in all.
const (
	maxLateUs    = 5000
	liveAttempts = 3
)

// cluster runs a topic over the k brokers that SRTM takes with the mcap given,
// then blindly over all. Of several attempts the one that sent least late counts.
// b is the contract's burst.
func (w *workshop) cluster(o load.Options, all int, mcap, b int64) (best *up.Report, err error) {
	sentLate := func(r *up.Report) int64 {
		return max(r.Phases[0].Emulator.Lateness.P99Us, r.Phases[1].Emulator.Lateness.P99Us)
	}
	for range liveAttempts {
		r, err := w.up(o, all, mcap, b)
		if err != nil {
			return nil, err
		}
		if best == nil || sentLate(r) < sentLate(best) {
			best = r
		}
		if sentLate(best) <= maxLateUs {
			break
		}
	}
	return best, nil
}

// up runs srtm up once. Exit code 1 with a report is a load that was not carried;
// the report says so.
func (w *workshop) up(o load.Options, all int, mcap, b int64) (*up.Report, error) {
	path, err := w.binary("srtm")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(w, liveLimit)
	defer cancel()
	cmd := command(ctx, path, append([]string{
		"up", "--output=json", "--calibration=0s", "--slo=" + time.Duration(sloMs*float64(time.Millisecond)).String(), "--brokers=" + strconv.Itoa(all), "--duration=" + (2 * livePhase).String(),
		"--mcap=" + strconv.FormatInt(mcap, 10), "--burst=" + strconv.FormatInt(b, 10),
	}, o.Args()...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	var r up.Report
	if json.Unmarshal(out.Bytes(), &r) != nil || len(r.Phases) != 2 || r.Phases[0].Broker == nil || r.Phases[1].Broker == nil {
		return nil, fmt.Errorf("srtm up: %w: %s", cmp.Or(err, errors.New("no report of two phases")), lastLine(errs.String()))
	}
	return &r, nil
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

// measured is a phase in ms, of the broker's figures.
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

func (m measured) cells(sim *outcome) []string {
	return []string{
		strconv.Itoa(m.k), number(m.p50), number(m.p99), number(m.access), number(m.processing), number(m.late), number(m.sentLate),
		number(sim.p99.mean), number(sim.access.mean),
	}
}

// same simulates what was measured: the same schedule, to the nanosecond, under
// the same contract on as many of the model's brokers. Blind placements differ
// from run to run, here as there.
func (w *workshop) same(o load.Options, r *up.Report, policy string, k int) (*outcome, error) {
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
	// The mean of a schedule may come out above the contract of its beginning.
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
		delivery, waits := obs.NewLatency(), obs.NewLatency()
		cluster, err := engine.New(slices.Repeat([]engine.Model{model}, k), []engine.Topic{{
			Stream: schedule.Until(l.Stream(), livePhase), Where: where, Limited: true, Shares: shares,
		}}, w.seed+uint64(i), func(d engine.Delivery) {
			delivery.Record(d.Latency())
			waits.Record(d.Access())
		})
		if err != nil {
			return nil, err
		}
		cluster.Advance(mono.Time(10 * livePhase)) // what waits for tokens at the end, too
		ms := func(l *obs.Latency, q float64) float64 { return float64(l.Quantile(q)) / 1e6 }
		p50, p99, access = append(p50, ms(delivery, 0.5)), append(p99, ms(delivery, 0.99)), append(access, ms(waits, 0.99))
	}
	return &outcome{k: k, runs: w.runs, p50: spreadOf(p50), p99: spreadOf(p99), access: spreadOf(access)}, nil
}

// mcapFor makes SRTM take k brokers for a topic of a rate.
func mcapFor(rate tokenbucket.Rate, k int) int64 {
	return int64(math.Ceil(rate.PerSecond() / (float64(k) - 0.5)))
}

// livePenalty is figure 6(a): the topic split over k brokers.
func livePenalty(w *workshop) (*work, error) {
	s := w.fleet(schedule.Poisson, 1, 0)
	rate, b, err := burst(s.Spec.Stream(), 0.99)
	if err != nil {
		return nil, err
	}
	p := panel{
		id: "live6a", title: "Figure 6(a) live, 1/10 of the publishers", xLabel: "brokers", yLabel: "p99, ms", logY: true, limit: sloMs,
		header: liveColumns,
	}
	curves := []series{{name: "delivery, live"}, {name: "delivery, simulated"}, {name: "access, live"}, {name: "access, simulated"}}
	var first, last measured
	var lastSim *outcome
	for k := 1; k <= brokers; k++ {
		w.stage("brokers", k, brokers)
		r, err := w.cluster(s, k, mcapFor(rate, 1), b)
		if err != nil {
			return nil, err
		}
		m := measure(&r.Phases[1])
		sim, err := w.same(s, r, placement.MaxMin, k)
		if err != nil {
			return nil, err
		}
		p.rows = append(p.rows, m.cells(sim))
		for i, y := range []float64{m.p99, sim.p99.mean, m.access, sim.access.mean} {
			curves[i].add(float64(k), y, 0, "")
		}
		if k == 1 {
			first = m
		}
		last, lastSim = m, sim
	}
	p.series = curves
	return &work{panels: []panel{p}, rows: []row{{
		Figure: "6(a)" + liveFigure, Quantity: "p99 of 100 publishers over k = 6 brokers", Simulated: ms(lastSim.p99.mean), Live: ms(last.p99),
		Note: fmt.Sprintf("access delays are ten times as long as at full size; k = 1 live: %s", ms(first.p99)),
	}}}, nil
}

// liveConcentration is figure 7 at its left end: one broker (Conc) and six (LB).
func liveConcentration(w *workshop) (*work, error) {
	made := &work{}
	p := panel{id: "live7", header: append([]string{"panel", "process", "batch", "policy"}, liveColumns...)}
	for i, pr := range profiles {
		w.stage("profiles", i+1, len(profiles))
		s := w.fleet(pr.process, pr.batch, 0)
		rate, b, err := burst(s.Spec.Stream(), 0.99)
		if err != nil {
			return nil, err
		}
		r, err := w.cluster(s, brokers, mcapFor(rate, 1), max(b, brokers))
		if err != nil {
			return nil, err
		}
		conc, lb := measure(&r.Phases[0]), measure(&r.Phases[1])
		simConc, err := w.same(s, r, placement.Conc, 1)
		if err != nil {
			return nil, err
		}
		simLB, err := w.same(s, r, placement.LoadBalance, brokers)
		if err != nil {
			return nil, err
		}
		lead := []string{pr.panel, string(pr.process), strconv.Itoa(pr.batch)}
		p.rows = append(p.rows, append(append([]string(nil), append(lead, "conc")...), conc.cells(simConc)...),
			append(append([]string(nil), append(lead, "loadbalance")...), lb.cells(simLB)...))
		made.rows = append(made.rows, row{
			Figure: fmt.Sprintf("7(%s)%s", pr.panel, liveFigure), Quantity: fmt.Sprintf("p99 of 100 publishers, %s, batch %d: Conc, LB", pr.process, pr.batch),
			Simulated: ms(simConc.p99.mean) + ", " + ms(simLB.p99.mean), Live: ms(conc.p99) + ", " + ms(lb.p99),
		})
	}
	made.panels = []panel{p}
	return made, nil
}

// liveCorrelation is figure 10(b): groups that fire as one, over the same brokers
// with SRTM's placement and blindly.
func liveCorrelation(w *workshop) (*work, error) {
	p := panel{
		id: "live10b", title: "Figure 10(b) live, 1/10 of the publishers", xLabel: "publishers in a group", yLabel: "p99 of delivery latency, ms", logY: true, limit: sloMs,
		header: append([]string{"group_size", "policy"}, liveColumns...),
	}
	curves := []series{{name: "SRTM, live"}, {name: "SRTM, simulated"}, {name: "blind, live"}, {name: "blind, simulated"}}
	made := &work{}
	for i, g := range groupSizes {
		w.stage("group sizes", i+1, len(groupSizes))
		s := w.fleet(schedule.Periodic, 10, g)
		rate, b, err := burst(s.Spec.Stream(), marginQuantile)
		if err != nil {
			return nil, err
		}
		k := paperK[g]
		r, err := w.cluster(s, k, mcapFor(rate, k), b)
		if err != nil {
			return nil, err
		}
		srtm, blind := measure(&r.Phases[0]), measure(&r.Phases[1])
		simSRTM, err := w.same(s, r, placement.SRTM, k)
		if err != nil {
			return nil, err
		}
		simBlind, err := w.same(s, r, placement.MaxMin, k)
		if err != nil {
			return nil, err
		}
		group := strconv.Itoa(g)
		p.rows = append(p.rows, append([]string{group, "srtm"}, srtm.cells(simSRTM)...), append([]string{group, "blind"}, blind.cells(simBlind)...))
		for j, y := range []float64{srtm.p99, simSRTM.p99.mean, blind.p99, simBlind.p99.mean} {
			curves[j].add(float64(g), y, 0, strconv.Itoa(k))
		}
		if g == 30 {
			made.rows = []row{{
				Figure: "10(b)" + liveFigure, Quantity: "p99 at group size 30 over 6 brokers: SRTM, blind",
				Simulated: ms(simSRTM.p99.mean) + ", " + ms(simBlind.p99.mean), Live: ms(srtm.p99) + ", " + ms(blind.p99),
				Note: fmt.Sprintf("access delay alone, live: %s, %s", ms(srtm.access), ms(blind.access)),
			}}
		}
	}
	for j := range curves[1:] {
		curves[j+1].labels = nil // all are SRTM's
	}
	p.series = curves
	made.panels = []panel{p}
	return made, nil
}

// liveTraces replays recorded traffic, a tenth of what is simulated, with SRTM's
// placement over six brokers and blindly.
func liveTraces(w *workshop) (*work, error) {
	made := &work{}
	p := panel{id: "livetraces", header: append([]string{"trace", "policy"}, liveColumns...)}
	for i, t := range recorded {
		w.stage("recordings", i+1, len(recorded))
		o := load.Default()
		o.Trace, o.Spec.Seed = filepath.Join(w.traces, t.file), w.seed
		if _, err := os.Stat(o.Trace); err != nil {
			return nil, impossible{"the recorded traffic is not there: " + t.file}
		}
		o.Replay.Compress, o.Replay.Copies = t.compress, max(1, t.copies/10)
		o.Replay.From = time.Duration(t.from * float64(time.Second))
		o.Replay.To = o.Replay.From + time.Duration(t.compress*float64(livePhase+2*time.Second))
		l, err := o.Build()
		if err != nil {
			return nil, err
		}
		_, b, err := burst(l.Stream(), 0.99)
		if err != nil {
			return nil, err
		}
		b = max(brokers, (5*b+3)/4) // the next recording differs: a quarter more
		r, err := w.cluster(o, brokers, mcapFor(tokenbucket.PerSecond(1.1*l.Rate()), brokers), b)
		if err != nil {
			return nil, err
		}
		srtm, blind := measure(&r.Phases[0]), measure(&r.Phases[1])
		simSRTM, err := w.same(o, r, placement.SRTM, srtm.k)
		if err != nil {
			return nil, err
		}
		simBlind, err := w.same(o, r, placement.MaxMin, blind.k)
		if err != nil {
			return nil, err
		}
		p.rows = append(p.rows, append([]string{t.id, "srtm"}, srtm.cells(simSRTM)...), append([]string{t.id, "blind"}, blind.cells(simBlind)...))
		made.rows = append(made.rows, row{
			Figure: "recorded: " + t.id + ", 1/10", Quantity: fmt.Sprintf("p99 over %d and %d brokers: SRTM, blind", srtm.k, blind.k),
			Simulated: ms(simSRTM.p99.mean) + ", " + ms(simBlind.p99.mean), Live: ms(srtm.p99) + ", " + ms(blind.p99),
			Note: fmt.Sprintf("%.0f msg/s, b = %d, a quarter more than profiled", l.Rate(), r.Burst),
		})
	}
	made.panels = []panel{p}
	return made, nil
}

// fortieth is the part of figure 8 that is measured live.
const fortieth = 40

// liveMaxMin is figure 8(a) for 8,000 publishers, on its three brokers: Conc and
// Max-Min place it by the paper's mcap, and each broker is loaded and limited
// accordingly.
func liveMaxMin(w *workshop) (*work, error) {
	p := panel{id: "live8a", header: []string{"policy", "broker", "publishers", "background", "p50_ms", "p99_ms", "sent_late_p99_ms", "simulated_p99_ms"}}
	worst := map[string][2]string{}
	for i, policy := range []string{placement.Conc, placement.MaxMin} {
		w.stage("policies", i+1, 2)
		topic := scenario.Topic{Load: scenario.Load{Publishers: 8000 / fortieth, Rate: perPublisher, Batch: 1}, Policy: policy}
		s := w.loaded(topic)
		for j := range s.Brokers {
			b := &s.Brokers[j]
			b.Mcap /= fortieth
			b.Allocated /= fortieth
			b.Background.Publishers /= fortieth
		}
		sim, err := w.repeat(s)
		if err != nil {
			return nil, err
		}
		s.Seed = w.seed
		built, err := build(s)
		if err != nil {
			return nil, err
		}
		reports, err := w.standalone(built)
		if err != nil {
			return nil, err
		}
		for j, q := range built.Topics[0].Plan.Quotas {
			r := reports[j]
			late := float64(r.EndToEnd.P99Us) / 1000
			p.rows = append(p.rows, []string{
				policy, q.Broker, strconv.Itoa(len(q.Publishers)), strconv.Itoa(r.Background.Publishers), number(float64(r.EndToEnd.P50Us) / 1000), number(late),
				number(float64(r.Lateness.P99Us) / 1000), number(sim.parts[q.Broker].mean),
			})
			if q.Broker == "b3" {
				worst[policy] = [2]string{ms(sim.parts[q.Broker].mean), ms(late)}
			}
		}
	}
	c, m := worst[placement.Conc], worst[placement.MaxMin]
	return &work{panels: []panel{p}, rows: []row{{
		Figure: "8(a), 1/40", Quantity: "p99 on broker 3, 200 publishers: Conc, Max-Min", Simulated: c[0] + ", " + m[0], Live: c[1] + ", " + m[1],
		Note: "access delays are 40 times as long as at full size",
	}}}, nil
}

// standalone runs a broker and a fleet for each quota of a plan, all at once, and
// returns the fleets' reports.
func (w *workshop) standalone(b *scenario.Built) (reports []report.Report, err error) {
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
	serving, stop := context.WithCancel(ctx)
	plan := b.Topics[0].Plan
	var daemons, fleets []*exec.Cmd
	outputs, complaints := make([]bytes.Buffer, len(plan.Quotas)), make([]bytes.Buffer, len(plan.Quotas))
	defer func() {
		stop()
		for _, d := range daemons {
			// Stopped by a signal that was sent: that it ended so is no news.
			_ = d.Wait()
		}
	}()
	addresses, err := freeAddresses(len(plan.Quotas))
	if err != nil {
		return nil, err
	}
	for i, q := range plan.Quotas {
		address := addresses[i]
		folder := filepath.Join(data, q.Broker)
		if err := os.Mkdir(folder, 0o755); err != nil {
			return nil, err
		}
		d := command(serving, nsqd, "--tcp-address="+address, "--http-address=", "--data-path="+folder, "--log-level=error",
			"--mem-queue-size=100000", fmt.Sprintf("--topic-limit=t:%s:%d", strconv.FormatFloat(q.Share.Rate.PerSecond(), 'f', 3, 64), q.Share.Burst))
		if err := d.Start(); err != nil {
			return nil, err
		}
		daemons = append(daemons, d)
		background := 0
		for _, spec := range b.Scenario.Brokers {
			if spec.ID == q.Broker {
				background = spec.Background.Publishers
			}
		}
		f := command(ctx, iotpub, "run", "--nsqd-tcp-address="+address, "--topic=t", "--publishers="+strconv.Itoa(len(q.Publishers)), "--rate="+number(perPublisher),
			"--duration="+livePhase.String(), "--subscribe", "--progress=0", "--output=json", "--seed="+strconv.FormatUint(w.seed+uint64(i), 10),
			fmt.Sprintf("--background=%s=%d", address, background))
		f.Stdout, f.Stderr = &outputs[i], &complaints[i]
		fleets = append(fleets, f)
	}
	for i, f := range fleets {
		if err := listening(ctx, addresses[i]); err != nil {
			return nil, fmt.Errorf("nsqd %d: %w", i, err)
		}
		if err := f.Start(); err != nil {
			return nil, err
		}
	}
	var errs []error
	for i, f := range fleets {
		if err := f.Wait(); err != nil {
			errs = append(errs, fmt.Errorf("iotpub %d: %w: %s", i, err, lastLine(complaints[i].String())))
			continue
		}
		var r report.Report
		if err := json.Unmarshal(outputs[i].Bytes(), &r); err != nil {
			errs = append(errs, fmt.Errorf("iotpub %d: %w", i, err))
		}
		reports = append(reports, r)
	}
	return reports, errors.Join(errs...)
}

// freeAddresses are n different ones that nobody listened on a moment ago.
func freeAddresses(n int) (addresses []string, err error) {
	for range n {
		l, listenErr := net.Listen("tcp", "127.0.0.1:0")
		if listenErr != nil {
			return nil, listenErr
		}
		// Only after all are there, or two could be the same.
		defer func() { err = errors.Join(err, l.Close()) }()
		addresses = append(addresses, l.Addr().String())
	}
	return addresses, nil
}

// listening waits until somebody accepts connections there.
func listening(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var dialer net.Dialer
	for {
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return err
		}
	}
}
