package up

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
	"github.com/srtm-io/srtm/tools/srtm/calibrate"
	"github.com/srtm-io/srtm/tools/srtm/screen"
)

func TestValidate(t *testing.T) {
	o := defaults()
	if err := o.validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	for want, change := range map[string]func(*options){
		"--brokers 0: want 1 to 100":      func(o *options) { o.brokers = 0 },
		"--mcap 0 msg/s":                  func(o *options) { o.mcap = 0 },
		"--duration 1s: want at least 2s": func(o *options) { o.duration = time.Second },
		"--slo-quantile 1:":               func(o *options) { o.quantile = 1 },
		"--slo-quantile NaN:":             func(o *options) { o.quantile = math.NaN() },
		"--slo: -1ms is below":            func(o *options) { o.slo = -time.Millisecond },
		"--slo: 5ns is below":             func(o *options) { o.slo = 5 },
		"--burst -1":                      func(o *options) { o.burst = -1 },
		"--burst 5: want at least one message for each of 6 brokers": func(o *options) { o.burst = 5 },
		"--calibration 10ms: want 0, or at least 1s":                 func(o *options) { o.calibration = 10 * time.Millisecond },
		"--max-lateness 0s":                  func(o *options) { o.maxLateness = 0 },
		"--mem-queue-size 0":                 func(o *options) { o.memQueue = 0 },
		`--output "xml": want table or json`: func(o *options) { o.output = "xml" },
	} {
		o := defaults()
		change(&o)
		testkit.ErrorHas(t, o.validate(), want)
	}
	if err := (&options{}).validate(); strings.Count(err.Error(), "\n") != 6 {
		t.Errorf("want seven faults, one a line, got:\n%v", err)
	}
}

// With its margin, the default topic fits one broker. Otherwise SRTM could not place the topic on one broker.
func TestTheDefaultFitsOneBroker(t *testing.T) {
	o := defaults()
	l := testkit.Result(o.load.Build()).Must(t)
	if need := l.Rate() * rateMargin * 1.05; need > float64(o.mcap) {
		t.Errorf("%v msg/s on a broker of %d", need, o.mcap)
	}
}

func quantiles99(base time.Duration, n int) (*histogram.Latency, report.Quantiles) {
	l := histogram.NewLatency()
	for i := range n {
		l.Record(base * time.Duration(i+1) / time.Duration(n))
	}
	return l, report.QuantilesOf(l)
}

// The emulator's output may come in pieces of any size.
func TestEmulatorReadsLinesHoweverTheyAreCut(t *testing.T) {
	progress := testkit.Result(json.Marshal(report.Progress{Type: report.TypeProgress, ElapsedSeconds: 3})).Must(t)
	final := testkit.Result(json.Marshal(report.Report{Type: report.TypeReport, Topic: "t"})).Must(t)
	out := slices.Concat(progress, []byte("\n"), final, []byte("\n"))
	for cut := range out {
		var e emulator
		for _, part := range [][]byte{out[:cut], out[cut:]} {
			testkit.Result(e.Write(part)).MustEqual(t, len(part))
		}
		if e.progress() == nil || e.progress().ElapsedSeconds != 3 || e.mu.report == nil || e.mu.report.Topic != "t" || e.mu.fault != nil {
			t.Fatalf("cut at %d: %+v, %+v, %v", cut, e.progress(), e.mu.report, e.mu.fault)
		}
	}
}

func TestEmulatorNoticesALineThatIsNone(t *testing.T) {
	for _, line := range []string{"panic: oh", `{"type":"other"}`, `{"type":"report","offered":"many"}`, ""} {
		var e emulator
		testkit.Result(e.Write([]byte(line + "\n" + `{"type":"progress"}` + "\n"))).Must(t)
		if e.mu.fault == nil || e.progress() == nil {
			t.Errorf("%q: %v, %v", line, e.mu.fault, e.progress())
		}
	}
}

func TestContract(t *testing.T) {
	o := defaults()
	o.load.Spec.Publishers, o.load.Spec.Rate = 100, 10
	l := testkit.Result(o.load.Build()).Must(t)
	const phase = 10 * time.Second
	arrivals := schedule.Arrivals(schedule.Until(l.Stream(), phase))
	r := &run{options: o, load: l}
	c := testkit.Result(r.contract(phase)).Must(t)
	offered := math.Max(float64(len(arrivals))/phase.Seconds(), 1000)
	if got := float64(c.RateMilli) / 1000; got < 1.1*offered || got > 1.1*offered+2 {
		t.Errorf("r = %v for %v msg/s offered", got, offered)
	}
	need, err := tokenbucket.Profile(arrivals, tokenbucket.Rate(c.RateMilli), 0.99)
	testkit.Must(t, err)
	if want := burstFor(need, 6); c.Burst != want || r.report.ProfiledBurst != need {
		t.Errorf("b = %d, want %d for a need of %d", c.Burst, want, need)
	}
	if slo := c.Slo.Latency.AsDuration(); slo != sloFor(0, time.Duration(r.report.SplitUs)*time.Microsecond) || !r.report.SLODerived {
		t.Errorf("SLO %v for a split that waits %d us", slo, r.report.SplitUs)
	}
	// Each broker gets at least one token.
	r.options.load.Spec.Publishers, r.options.brokers = 1, 50
	r.load, err = r.options.load.Build()
	testkit.Must(t, err)
	if c, err = r.contract(phase); err != nil || c.Burst != 50 {
		t.Errorf("b = %v, %v for 50 brokers", c.GetBurst(), err)
	}
	r.options.burst, r.options.slo = 77, 3*time.Millisecond
	if c, err = r.contract(phase); err != nil || c.Burst != 77 || c.Slo.Latency.AsDuration() != 3*time.Millisecond {
		t.Errorf("%v, %v; 77 and 3ms were asked for", c, err)
	}
	r.options.brokers = 1
	if _, err = r.contract(phase); err != nil || r.report.SplitUs != 0 {
		t.Errorf("%v; one broker splits nothing, and yet it waits %d us", err, r.report.SplitUs)
	}
	r.options.load.Spec.Rate = 0.001
	r.load, err = r.options.load.Build()
	testkit.Must(t, err)
	if _, err = r.contract(time.Nanosecond); err == nil || !strings.Contains(err.Error(), "no message within 1ns") {
		t.Errorf("%v", err)
	}
}

func shownTopic() *srtmv1.Topic {
	fast, _ := quantiles99(400*time.Microsecond, 1000)
	slow, _ := quantiles99(12*time.Millisecond, 1000)
	stats := func(l *histogram.Latency, offered uint64) *srtmv1.TopicStats {
		return &srtmv1.TopicStats{
			Interval: durationpb.New(2 * time.Second), Offered: offered, Delivered: offered, Publishers: 500,
			Access: obs.LatencyProto(fast), Processing: obs.LatencyProto(fast), Delivery: obs.LatencyProto(l),
		}
	}
	met := false
	return &srtmv1.Topic{
		Spec: &srtmv1.TopicSpec{Name: "sensors", Contract: &srtmv1.Contract{
			RateMilli: 11_000_000, Burst: 50, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Millisecond)},
		}},
		Quotas: []*srtmv1.BrokerQuota{{BrokerId: "broker1"}, {BrokerId: "broker2"}},
		Status: &srtmv1.TopicStatus{
			Window: durationpb.New(10 * time.Second),
			Brokers: []*srtmv1.BrokerTopicStatus{
				{BrokerId: "broker1", Share: &srtmv1.Share{RateMilli: 8_000_500, Burst: 30}, Last: stats(fast, 16_000), Window: stats(fast, 80_000)},
				{BrokerId: "broker2", Share: &srtmv1.Share{RateMilli: 2_999_500, Burst: 20}, Last: stats(slow, 4_000), Window: stats(slow, 20_000)},
				{BrokerId: "broker3"},
			},
			Pooled: stats(slow, 100_000), ExceedFraction: 0.0123, SloMet: &met,
		},
	}
}

func TestView(t *testing.T) {
	_, late := quantiles99(100*time.Microsecond, 1000)
	f := &frame{
		title: "SRTM placement (phase 1 of 2)", duration: 30 * time.Second, brokers: 6, topic: shownTopic(),
		progress: &report.Progress{ElapsedSeconds: 7.02, OfferedRate: 10_004.4, AcceptedRate: 10_003, DeliveredRate: 9_999, Lateness: late, EndToEnd: late},
	}
	var b bytes.Buffer
	width := 0
	s := screen.New(&b)
	s.Terminal, s.Size = true, func() (int, int) { return width, 0 }
	v := &view{w: &b, screen: s}
	v.printf("hello %s", "world")
	v.draw(f)
	f.progress.ElapsedSeconds = 8
	width = 40 // the window has become smaller
	v.draw(f)
	v.printf("done")
	testkit.Golden(t, "testdata/terminal.txt", b.Bytes())

	b.Reset()
	v = &view{w: &b, screen: screen.New(&b)}
	for second := range 13 {
		f.progress.ElapsedSeconds = float64(second+1) + 0.01
		v.draw(f)
	}
	f.topic.Status = nil // before the first report
	v.done(f.title)
	v.draw(f)
	testkit.Golden(t, "testdata/lines.txt", b.Bytes())
}

func shownReport() *Report {
	_, fast := quantiles99(time.Millisecond, 1000)
	_, slow := quantiles99(14*time.Millisecond, 1000)
	phase := func(name, policy string, brokers int, q report.Quantiles, met bool) Phase {
		waited := 0.25
		p := Phase{
			Name: name, Policy: policy, Topic: "t",
			Emulator: report.Report{
				Protocol: "mqtt",
				Counts:   report.Counts{Offered: 300_000, Sent: 300_000, Accepted: 300_000, Delivered: 300_000},
				Seconds:  30, OfferedRate: 10_000, AchievedRate: 9_999, Lateness: fast, EndToEnd: &q,
				Account: &verify.Result{Accepted: 300_000, Delivered: 300_000},
			},
			OnTime: &OnTime{Access: q}, Pressure: &waited,
			Broker: &BrokerSide{WindowSeconds: 10, Delivered: 100_000, Access: q, Processing: fast, Delivery: q, ExceedFraction: 0.001, SLOMet: &met},
		}
		if !met {
			p.OnTime.Late = 200_000
		}
		for i := range brokers {
			p.Placement = append(p.Placement, Placed{
				Broker: "b", Publishers: 1000 / uint32(brokers), RateMilli: 11_000_000/int64(brokers) - int64(i), Burst: 50 / int64(brokers),
			})
		}
		return p
	}
	return &Report{
		Version: "SRTM x", CPUs: 2, Platform: "linux/amd64", Brokers: 6, Mcap: 20_000, Seed: 1, Load: "1000 publishers",
		Calibration: []calibrate.Attempt{
			{Publishers: 1000, OfferedRate: 10_000, AchievedRate: 7_000, Lateness: slow, EndToEnd: slow, Why: "only 70.0 % of the offered rate was achieved"},
			{Publishers: 560, OfferedRate: 5_600, AchievedRate: 5_600, Lateness: fast, EndToEnd: fast, Carried: true},
		},
		Reduced: true, RateMilli: 11_000_000, Burst: 50, ProfiledBurst: 40, Quantile: 0.99, SLOUs: 1000, SLODerived: true, MachineUs: 600, SplitOver: 6, SplitUs: 14_000, MaxLatenessUs: 5000,
		Phases: []Phase{phase("SRTM placement", "srtm", 1, fast, true), phase("blind split", "loadbalance", 6, slow, false)},
	}
}

func TestReport(t *testing.T) {
	show := func(file string, r *Report) {
		t.Helper()
		var b bytes.Buffer
		testkit.Must(t, r.WriteText(&b))
		testkit.Golden(t, "testdata/"+file, b.Bytes())
	}
	good := shownReport()
	if faults := good.Faults(); faults != nil {
		t.Errorf("faults: %v", faults)
	}
	show("report.txt", good)
	text := testkit.Result(json.MarshalIndent(good, "", "  ")).Must(t)
	testkit.Golden(t, "testdata/report.json", append(text, '\n'))

	bad := shownReport()
	a := &bad.Phases[0].Emulator
	a.Account.Lost, a.Account.Duplicated, a.AchievedRate, a.Skipped, a.Refused = 3, 1, 9_000, 7, map[string]uint64{"E_QUEUE_FULL": 5}
	bad.Phases[1].Broker = nil
	bad.Failure = "stop the cluster: a disk is full"
	_, bad.Phases[1].Emulator.Lateness = quantiles99(40*time.Millisecond, 1000)
	show("bad.txt", bad)

	cut := shownReport()
	cut.Interrupted, cut.Phases = true, cut.Phases[:1]
	show("interrupted.txt", cut)
	show("nothing.txt", &Report{Version: "SRTM x", CPUs: 1, Platform: "p", Brokers: 1, Mcap: 1})
}

// The notes on a phase are true for the phase.
func TestNotesExplainThePhase(t *testing.T) {
	_, late := quantiles99(20*time.Millisecond, 1000)
	for name, c := range map[string]struct {
		change func(*Report, *Phase)
		want   []string // prefixes of the notes
	}{
		"all is well":      {func(*Report, *Phase) {}, nil},
		"a busy machine":   {func(_ *Report, p *Phase) { p.Emulator.Lateness = late }, []string{"these results are as much this machine's"}},
		"it missed":        {func(_ *Report, p *Phase) { p.Broker.SLOMet = new(bool) }, []string{"this machine missed the SLO, not the tokens: sent on time, none"}},
		"a few are late":   {func(_ *Report, p *Phase) { p.Broker.SLOMet, p.OnTime.Late = new(bool), 999 }, []string{"this machine missed the SLO, not the tokens: sent on time, 999 of"}},
		"too few tokens":   {func(_ *Report, p *Phase) { p.Broker.SLOMet, p.OnTime.Late = new(bool), 1001 }, nil},
		"it may be both":   {func(_ *Report, p *Phase) { p.Broker.SLOMet, p.OnTime.Late, p.Emulator.Lateness = new(bool), 1001, late }, []string{"these results are"}},
		"nothing measured": {func(_ *Report, p *Phase) { p.Broker, p.OnTime, p.Pressure = nil, nil, nil }, nil},
		"not carried":      {func(_ *Report, p *Phase) { p.Emulator.AchievedRate = 9_600 }, []string{"this machine did not carry the load: 9600.0 msg/s of 10000.0"}},
		"interrupted":      {func(_ *Report, p *Phase) { p.Emulator.AchievedRate, p.Emulator.Interrupted = 9_600, true }, nil},
	} {
		r := shownReport()
		p := &r.Phases[0]
		c.change(r, p)
		got := r.notes(p)
		if len(got) != len(c.want) {
			t.Errorf("%s: %q", name, got)
			continue
		}
		for i := range got {
			if !strings.HasPrefix(got[i], c.want[i]) {
				t.Errorf("%s: %q, want %q", name, got[i], c.want[i])
			}
		}
	}
}

func TestReportFaults(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Report)
		want   []string
	}{
		"none":            {func(*Report) {}, nil},
		"missing the SLO": {func(r *Report) { r.Phases[0].Broker.SLOMet = new(bool) }, nil},
		"lost":            {func(r *Report) { r.Phases[1].Emulator.Account.Lost = 2 }, []string{"blind split: lost 2 accepted messages"}},
		"not carried":     {func(r *Report) { r.Phases[0].Emulator.AchievedRate = 9_600 }, nil},
		"lost at first":   {func(r *Report) { r.Calibration[0].Fault = "lost 1 accepted message" }, []string{"calibration: lost 1 accepted message"}},
		"nobody checked":  {func(r *Report) { r.Phases[0].Emulator.Account = nil }, []string{"SRTM placement: the delivered messages were not checked"}},
		"no phase":        {func(r *Report) { r.Phases = nil }, []string{"nothing was measured"}},
		"cut short":       {func(r *Report) { r.Phases, r.Interrupted = nil, true }, nil},
		"cut short, slow start": {func(r *Report) {
			r.Interrupted, r.Phases[0].Emulator.Interrupted, r.Phases[0].Emulator.AchievedRate = true, true, 9_000
		}, nil},
		"cut short, and lost": {func(r *Report) {
			r.Interrupted, r.Phases[0].Emulator.Interrupted, r.Phases[0].Emulator.Account.Lost = true, true, 1
		}, []string{"SRTM placement: lost 1 accepted message"}},
	} {
		r := shownReport()
		c.change(r)
		testkit.EqualSlices(t, r.Faults(), c.want, "%s", name)
	}
}

func TestObserveKeepsTheNewestFigures(t *testing.T) {
	var p Phase
	p.observe(nil)
	p.observe(&srtmv1.TopicStatus{})
	if p.Broker != nil {
		t.Errorf("%+v without a delivery", p.Broker)
	}
	p.observe(shownTopic().Status)
	if p.Broker == nil || p.Broker.Delivered != 100_000 || p.Broker.WindowSeconds != 2 || p.Broker.ExceedFraction != 0.0123 || *p.Broker.SLOMet || p.Broker.Delivery.Count != 1000 {
		t.Errorf("%+v", p.Broker)
	}
}
