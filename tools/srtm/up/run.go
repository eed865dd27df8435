package up

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/srtm/cluster"
)

const (
	// carriedFraction is how much of the offered rate must be achieved for a
	// load to count as carried.
	carriedFraction = 0.97
	// rateMargin and burstMargin are what the contract has above what the load
	// was seen to need. A burst sits on the 1 % edge of one recording and
	// differs from one to the next by some percent; a quarter covers that.
	rateMargin  = 1.1
	burstMargin = 1.25
	// maxAttempts bounds the search for a load that this machine carries.
	maxAttempts = 6
	// lateAttempts is after how many attempts a load that was achieved in full,
	// but late, is taken all the same.
	lateAttempts = 4
	// generous is the burst of the calibration's contract.
	generous = 100_000
	// callTimeout bounds a call of the API, startTimeout the cluster's start.
	callTimeout  = 15 * time.Second
	startTimeout = 30 * time.Second
	channel      = "up"
)

// run is the state of one `srtm up`.
type run struct {
	options
	load    *load.Load
	stdout  io.Writer
	view    *view
	cluster *cluster.Cluster
	admin   srtmv1.AdminServiceClient
	report  Report
}

// all does everything. When ctx ends early, what was done is reported. The
// error says what was wrong, with the cluster or with what it did.
func (r *run) all(ctx context.Context) error {
	r.report = Report{
		Version: obs.Version(), CPUs: runtime.NumCPU(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		Brokers: r.brokers, Mcap: r.mcap, Seed: r.options.load.Spec.Seed, SLOUs: r.slo.Microseconds(), Quantile: r.quantile,
		MaxLatenessUs: r.maxLateness.Microseconds(),
	}
	r.view.say("starting %s, a loaddistributor and a tbadaptor", plural(r.brokers, "broker"))
	c, err := cluster.Start(ctx, cluster.Config{
		Brokers: r.brokers, Mcap: r.mcap, BinDir: r.binDir, LogDir: r.dataDir, StartTimeout: startTimeout,
		LoaddistributorFlags: []string{"--fitting=off"}, // placements are compared as they are
		BrokerFlags:          []string{"--mem-queue-size=" + strconv.Itoa(r.memQueue), "--log-level=" + r.logLevel},
	})
	if err != nil {
		if ctx.Err() != nil {
			return errors.Join(errors.New("interrupted before the cluster was up"), err)
		}
		return fmt.Errorf("start the cluster: %w", err)
	}
	r.cluster, r.admin = c, srtmv1.NewAdminServiceClient(c.Conn)
	err = r.measure(ctx)
	if stopped := c.Stop(); stopped != nil {
		err = errors.Join(err, fmt.Errorf("stop the cluster: %w", stopped))
	}
	if err != nil {
		return err
	}
	r.report.Interrupted = ctx.Err() != nil
	if r.output == "json" {
		encoder := json.NewEncoder(r.stdout)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(&r.report)
	} else {
		err = r.report.WriteText(r.stdout)
	}
	if err != nil {
		return fmt.Errorf("print the report: %w", err)
	}
	if faults := r.report.Faults(); len(faults) > 0 {
		return errors.New(strings.Join(faults, "\n"))
	}
	return nil
}

// measure calibrates and goes through the phases.
func (r *run) measure(ctx context.Context) error {
	captured, err := r.calibrate(ctx)
	if err != nil || ctx.Err() != nil {
		return err
	}
	r.report.Load = r.load.Text
	phase := r.duration / 2
	contract, err := r.contract(phase, captured)
	if err != nil {
		return err
	}
	r.view.say("contract: %s", r.report.contractText())
	for i, p := range []struct{ name, policy, topic string }{
		{"SRTM placement", "srtm", "sensors"},
		{"blind split", "loadbalance", "sensors-blind"},
	} {
		if ctx.Err() != nil {
			return nil
		}
		result, err := r.phase(ctx, phaseSpec{
			name: p.name, title: fmt.Sprintf("%s (phase %d of 2)", p.name, i+1),
			spec: r.topicSpec(p.topic, p.policy, contract), duration: phase, file: strconv.Itoa(i + 1), live: true,
		})
		if result != nil {
			r.report.Phases = append(r.report.Phases, *result)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// calibrate finds a load that this machine carries, with the topic split over
// all brokers, which costs more than any other layout: each broker's share of
// the work comes in smaller pieces. It returns when the messages were written.
func (r *run) calibrate(ctx context.Context) (captured []stamp.Mono, err error) {
	if r.calibration == 0 {
		return nil, nil
	}
	repeated := false
	for attempt := 1; attempt <= maxAttempts; attempt++ {
		file := filepath.Join(r.dataDir, fmt.Sprintf("calibration-%d.txt", attempt))
		contract := &srtmv1.Contract{
			RateMilli: int64(math.Ceil(1000 * math.Min(float64(r.mcap)*float64(r.brokers), math.Max(4*r.load.Rate(), 1)))),
			Burst:     generous, Slo: r.sloProto(),
		}
		result, err := r.phase(ctx, phaseSpec{
			name: "calibration", title: "calibration", capture: file,
			spec:     r.topicSpec("calibration", "loadbalance", contract),
			duration: r.calibration, file: fmt.Sprintf("calibration-%d", attempt),
		})
		if err != nil {
			return nil, fmt.Errorf("calibration: %w", err)
		}
		if ctx.Err() != nil {
			return nil, nil
		}
		a := judge(&result.Emulator, r.maxLateness)
		r.report.Calibration = append(r.report.Calibration, a)
		r.view.say("calibration: %s", a.text())
		if a.Carried {
			return readTimes(file)
		}
		if a.AchievedRate >= carriedFraction*a.OfferedRate && !repeated {
			// Late, but carried: the machine may have been busy with something
			// else for a moment.
			repeated = true
			continue
		}
		if attempt >= lateAttempts && a.AchievedRate >= carriedFraction*a.OfferedRate && a.NotAccepted == 0 {
			// It is not the load: the machine is busy with something else.
			r.view.say("this machine carries the rate but sends late whatever the load; the report says how late")
			return readTimes(file)
		}
		repeated = false
		smaller := shorten(r.options.load, r.load, a.fraction())
		l, err := smaller.Build()
		if err != nil {
			return nil, err
		}
		if len(l.Sources) == len(r.load.Sources) {
			break
		}
		r.options.load, r.load = smaller, l
		r.report.Reduced = true
		r.view.say("this machine does not carry that; trying %s", plural(len(l.Sources), "publisher"))
	}
	return nil, fmt.Errorf("this machine does not carry even %s: %s",
		plural(r.report.Calibration[len(r.report.Calibration)-1].Publishers, "publisher"),
		r.report.Calibration[len(r.report.Calibration)-1].text())
}

// contract profiles the load. b is the smallest burst with which 99 % of the
// phase's messages find a token, of those intended and of those captured, and a
// quarter more.
func (r *run) contract(phase time.Duration, captured []stamp.Mono) (*srtmv1.Contract, error) {
	offsets := schedule.Arrivals(schedule.Until(r.load.Stream(), phase))
	if len(offsets) == 0 {
		return nil, fmt.Errorf("the load has no message within %v", phase)
	}
	if r.load.Span > 0 {
		phase = min(phase, r.load.Span)
	}
	// The declared mean is that of a whole recording; the phase may be busier.
	offered := max(float64(len(offsets))/phase.Seconds(), r.load.Rate())
	rate := tokenbucket.PerSecond(math.Ceil(offered * rateMargin))
	burst := r.burst
	if burst == 0 {
		intended := make([]stamp.Mono, len(offsets))
		for i, at := range offsets {
			intended[i] = stamp.Mono(at)
		}
		for _, arrivals := range [][]stamp.Mono{intended, captured} {
			if len(arrivals) == 0 {
				continue
			}
			need, err := tokenbucket.Profile(arrivals, rate, r.quantile)
			if err != nil {
				return nil, fmt.Errorf("profile the load: %w", err)
			}
			r.report.ProfiledBurst = max(r.report.ProfiledBurst, need)
		}
		burst = max(int64(r.brokers), int64(math.Ceil(float64(r.report.ProfiledBurst)*burstMargin)))
	}
	r.report.RateMilli, r.report.Burst = int64(rate), burst
	return &srtmv1.Contract{RateMilli: int64(rate), Burst: burst, Slo: r.sloProto()}, nil
}

func (r *run) sloProto() *srtmv1.Slo {
	return &srtmv1.Slo{Quantile: r.quantile, Latency: durationpb.New(r.slo)}
}

// topicSpec declares the load's publishers. Placements are compared by the shares
// that they give; a rule that moves shares would make up for a bad placement.
func (r *run) topicSpec(name, policy string, contract *srtmv1.Contract) *srtmv1.TopicSpec {
	spec := &srtmv1.TopicSpec{Name: name, Contract: contract, PlacementPolicy: policy, ShareRule: share.Static, Channels: []string{channel}}
	if r.load.Groups != nil {
		for _, g := range r.load.Groups {
			s := r.options.load.Spec
			spec.Groups = append(spec.Groups, &srtmv1.PublisherGroup{Key: g.Key, Count: int32(g.Count), Rate: s.Rate, Batch: int32(s.Batch)})
		}
		return spec
	}
	for _, s := range r.load.Sources {
		spec.Publishers = append(spec.Publishers, &srtmv1.Publisher{Id: s.ID, CorrelationKey: s.Key, Rate: s.Rate, Batch: int32(s.Batch)})
	}
	return spec
}

// phaseSpec is what to do in a phase.
type phaseSpec struct {
	name, title   string
	spec          *srtmv1.TopicSpec
	duration      time.Duration
	file, capture string
	live          bool // show the table
}

// phase creates a topic, sends, and deletes the topic. A result comes with an
// error where there is something to report all the same.
func (r *run) phase(ctx context.Context, p phaseSpec) (_ *Phase, err error) {
	topic, err := r.create(ctx, p.spec)
	if err != nil {
		return nil, fmt.Errorf("create topic %s: %w", p.spec.Name, err)
	}
	result := &Phase{Name: p.name, Policy: p.spec.PlacementPolicy, Topic: p.spec.Name}
	for _, q := range topic.Quotas {
		result.Placement = append(result.Placement, Placed{
			Broker: q.BrokerId, Publishers: q.Publishers, RateMilli: q.GetShare().GetRateMilli(), Burst: q.GetShare().GetBurst(),
		})
	}
	defer func() {
		// Also after ctx has ended; without it the next phase finds less room.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
		defer cancel()
		if _, gone := r.admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: p.spec.Name}); gone != nil {
			err = errors.Join(err, fmt.Errorf("delete topic %s: %w", p.spec.Name, gone))
		}
	}()

	e, err := startEmulator(r.cluster, r.binDir, r.dataDir, job{
		name: p.file, topic: p.spec.Name, load: r.options.load, duration: p.duration, capture: p.capture,
	})
	if err != nil {
		return nil, err
	}
	rep, err := e.wait(ctx, r.cluster.Died, func() {
		progress := e.progress()
		if progress == nil || progress.ElapsedSeconds > p.duration.Seconds() {
			return // connecting, or draining
		}
		if t := r.status(ctx, p.spec.Name); t != nil {
			result.observe(t.Status)
			if p.live {
				r.view.draw(&frame{title: p.title, duration: p.duration, progress: progress, topic: t, brokers: r.brokers})
			}
		}
	})
	r.view.done()
	if err != nil {
		return nil, err
	}
	result.Emulator = *rep
	return result, nil
}

// create follows a creation to its end.
func (r *run) create(ctx context.Context, spec *srtmv1.TopicSpec) (*srtmv1.Topic, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	stream, err := r.admin.CreateTopic(ctx, &srtmv1.CreateTopicRequest{Spec: spec})
	if err != nil {
		return nil, err
	}
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, errors.New("the loaddistributor ended the call without the topic")
		}
		if err != nil {
			return nil, err
		}
		if resp.Topic != nil {
			return resp.Topic, nil
		}
	}
}

// status returns a topic with its figures, or nil when it cannot be had now.
func (r *run) status(ctx context.Context, name string) *srtmv1.Topic {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	resp, err := r.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: name, OmitPublishers: true})
	if err != nil {
		return nil // the next second brings another; a dead cluster shows elsewhere
	}
	return resp.Topic
}

// readTimes reads what iotpub --capture wrote.
func readTimes(path string) ([]stamp.Mono, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("captured times: %w", err)
	}
	defer f.Close() // only read
	var times []stamp.Mono
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		seconds, err := strconv.ParseFloat(lines.Text(), 64)
		if err != nil {
			return nil, fmt.Errorf("captured times: %s:%d: %w", path, n, err)
		}
		times = append(times, stamp.Mono(math.Round(seconds*1e9)))
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("captured times: %w", err)
	}
	return times, nil
}

// judge says whether a calibration's load was carried.
func judge(rep *report.Report, maxLateness time.Duration) Attempt {
	a := Attempt{
		Publishers: rep.Publishers, OfferedRate: rep.OfferedRate, AchievedRate: rep.AchievedRate,
		NotAccepted: rep.Skipped + rep.Unanswered + rep.RefusedTotal(), Lateness: rep.Lateness,
	}
	if rep.EndToEnd != nil {
		a.EndToEnd = *rep.EndToEnd
	}
	switch {
	case rep.AchievedFraction() < carriedFraction:
		a.Why = fmt.Sprintf("only %.1f %% of the offered rate was achieved", 100*rep.AchievedFraction())
	case a.NotAccepted > 0:
		a.Why = plural(int(a.NotAccepted), "message") + " not accepted"
	case rep.Lateness.P99() > maxLateness:
		a.Why = fmt.Sprintf("1 %% of the messages were sent more than %v late", rep.Lateness.P99())
	case rep.Fault() != "":
		a.Why = rep.Fault()
	default:
		a.Carried = true
	}
	return a
}

// fraction is what to try next of the load that was not carried.
func (a *Attempt) fraction() float64 {
	if a.OfferedRate == 0 {
		return 0.5
	}
	return min(0.7, max(0.2, 0.8*a.AchievedRate/a.OfferedRate))
}
