package up

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/srtm/calibrate"
)

const (
	// maxAttempts limits the search for a load that this machine carries.
	maxAttempts = 6
	// generous is the burst of the calibration's contract.
	generous = 100_000
	// callTimeout limits an API call, startTimeout the start of the cluster.
	callTimeout  = 15 * time.Second
	startTimeout = 30 * time.Second
	channel      = "up"
	// srtmTopic and blind are the topics of the two phases.
	srtmTopic, blind = "sensors", "sensors-blind"
)

type run struct {
	options
	load    *load.Load
	nats    string // path of nats-server; "": brokers store in files
	stdout  io.Writer
	view    *view
	cluster *local.Cluster
	admin   srtmv1.AdminServiceClient
	report  Report
	machine time.Duration // end-to-end latency from the calibration, without waits for tokens
}

// all does the whole run. When ctx ends early, all reports the completed part. The error
// describes a failure of the cluster or a fault of the results.
func (r *run) all(ctx context.Context) error {
	r.report = Report{
		Version: program.Version(), CPUs: runtime.NumCPU(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		Brokers: r.brokers, Mcap: r.mcap, Seed: r.options.load.Spec.Seed, Quantile: r.quantile,
		MaxLatenessUs: r.maxLateness.Microseconds(),
	}
	suffix := ""
	if r.nats != "" {
		suffix = ", three nats-servers"
	}
	r.view.printf("starting %s%s, a loaddistributor and a tbadaptor", plural.Count(r.brokers, "broker"), suffix)
	c, err := local.StartCluster(ctx, local.ClusterConfig{
		Brokers: r.brokers, Mcap: r.mcap, MQTT: r.mqtt, BinDir: r.binDir, LogDir: r.dataDir, StartTimeout: startTimeout, Admission: r.admission, Gateway: r.gateway, NATS: r.nats,
		LoaddistributorFlags: []string{"--fitting=off"}, // compare placements without later changes
		BrokerFlags:          []string{"--mem-queue-size=" + strconv.Itoa(r.memQueue), "--log-level=" + r.logLevel},
	})
	if err != nil {
		if ctx.Err() != nil {
			return errors.New("interrupted before the cluster was up") // err is a consequence of the interrupt
		}
		return fmt.Errorf("start the cluster: %w", err)
	}
	r.cluster, r.admin = c, srtmv1.NewAdminServiceClient(c.Conn)
	r.view.printf("console: http://%s/ui/compare?a=%s&b=%s", c.Lookup, srtmTopic, blind)
	if r.admission {
		r.view.printf("admission: srtm admission rule list --admission-address=%s", c.Admission)
	}
	if r.gateway {
		r.view.printf("gateway: POST http://%s/pub?topic=%s, policy %s", c.Gateway, srtmTopic, c.Policy)
	}
	if r.mqtt {
		r.view.printf("MQTT: the sensors publish to %[3]s; mosquitto_sub -p %[1]s -t %[2]s", strings.TrimPrefix(c.MQTT[0], "127.0.0.1:"), srtmTopic, c.MQTT[0])
	}
	err = r.measure(ctx)
	if stopped := c.Stop(); stopped != nil {
		err = errors.Join(err, fmt.Errorf("stop the cluster: %w", stopped))
	}
	if err != nil && len(r.report.Phases) == 0 {
		return err
	}
	r.report.Interrupted = ctx.Err() != nil
	if err != nil {
		r.report.Failure = err.Error()
	}
	var printing error
	if r.output == "json" {
		encoder := json.NewEncoder(r.stdout)
		encoder.SetIndent("", "  ")
		printing = encoder.Encode(&r.report)
	} else {
		printing = r.report.WriteText(r.stdout)
	}
	if printing != nil {
		return errors.Join(err, fmt.Errorf("print the report: %w", printing))
	}
	if err != nil {
		return err
	}
	if faults := r.report.Faults(); len(faults) > 0 {
		return errors.New(strings.Join(faults, "\n"))
	}
	return nil
}

func (r *run) measure(ctx context.Context) error {
	if err := r.calibrate(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	r.report.Load = r.load.Text
	phase := r.duration / 2
	if r.together {
		phase = r.duration
	}
	contract, err := r.contract(phase)
	if err != nil {
		return err
	}
	r.view.printf("contract: %s", r.report.contractText())
	specs := []phaseSpec{
		{name: "SRTM placement", spec: r.topicSpec(srtmTopic, "srtm", contract), duration: phase, file: "1", live: true},
		{name: "blind split", spec: r.topicSpec(blind, "loadbalance", contract), duration: phase, file: "2", live: true},
	}
	results, errs := make([]*Phase, len(specs)), make([]error, len(specs))
	var group errgroup.Group
	if !r.together {
		group.SetLimit(1) // Go waits for the previous phase
	}
	for i, p := range specs {
		if p.title = p.name; !r.together {
			p.title += fmt.Sprintf(" (phase %d of %d)", i+1, len(specs))
		}
		group.Go(func() error {
			if ctx.Err() == nil && (r.together || i == 0 || errs[i-1] == nil) {
				results[i], errs[i] = r.phase(ctx, p)
			}
			return nil
		})
	}
	_ = group.Wait() // errors are kept by phase
	for i, result := range results {
		if result != nil {
			r.report.Phases = append(r.report.Phases, *result)
		}
		if errs[i] != nil && !interrupted(ctx, errs[i]) {
			return fmt.Errorf("%s: %w", specs[i].name, errs[i])
		}
	}
	return nil
}

// interrupted reports whether ctx has ended and is the only cause of err.
func interrupted(ctx context.Context, err error) bool {
	return ctx.Err() != nil && (errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled)
}

// calibrate finds a load that this machine carries, with the topic split over all
// brokers. This layout costs the most: each broker gets its work in smaller pieces. If
// even the smallest load is too much, the run uses it anyway, and the report notes it.
func (r *run) calibrate(ctx context.Context) error {
	if r.calibration == 0 {
		return nil
	}
	repeated := false
	for attempt := 1; attempt <= maxAttempts; attempt++ {
		contract := &srtmv1.Contract{
			RateMilli: int64(math.Ceil(1000 * math.Min(float64(r.mcap)*float64(r.brokers), math.Max(4*r.load.Rate(), 1)))),
			Burst:     generous, Slo: r.sloProto(cmp.Or(r.slo, time.Second)),
		}
		result, err := r.phase(ctx, phaseSpec{
			name: "calibration", title: "calibration",
			spec:     r.topicSpec("calibration", "loadbalance", contract),
			duration: r.calibration, file: fmt.Sprintf("calibration-%d", attempt),
		})
		if err != nil && !interrupted(ctx, err) {
			return fmt.Errorf("calibration: %w", err)
		}
		if ctx.Err() != nil {
			return nil
		}
		a := calibrate.Attempted(&result.Emulator)
		r.report.Calibration = append(r.report.Calibration, a)
		r.view.printf("calibration: %s", a.Text())
		r.machine = a.EndToEnd.At(r.quantile)
		if !a.Carried && !repeated {
			repeated = true // another program may have kept the machine busy for a moment
			continue
		}
		if a.Carried || attempt == maxAttempts {
			return nil
		}
		smaller := a.Smaller(r.options.load, r.load)
		l, err := smaller.Build()
		if err != nil {
			return err
		}
		if len(l.Sources) == len(r.load.Sources) {
			return nil
		}
		repeated = false
		r.options.load, r.load = smaller, l
		r.report.Reduced = true
		r.view.printf("this machine does not carry that; trying %s", plural.Count(len(l.Sources), "publisher"))
	}
	return nil
}

// contract profiles the load. It chooses b so that one broker has spare tokens and a
// blind split has too few, and the SLO so that the difference shows.
func (r *run) contract(phase time.Duration) (*srtmv1.Contract, error) {
	scheduled := func() schedule.Stream { return schedule.Until(r.load.Stream(), phase) }
	arrivals := schedule.Arrivals(scheduled())
	if len(arrivals) == 0 {
		return nil, fmt.Errorf("the load has no message within %v", phase)
	}
	sending := phase
	if r.load.Span > 0 {
		sending = min(phase, r.load.Span)
	}
	// The load's mean rate covers a whole recording; the phase may be busier.
	offered := max(float64(len(arrivals))/sending.Seconds(), r.load.Rate())
	rate := tokenbucket.PerSecond(math.Ceil(offered * rateMargin))
	split := min(r.brokers, len(r.load.Sources)) // number of brokers of a blind split
	burst := r.burst
	if burst == 0 {
		need, err := tokenbucket.Profile(arrivals, rate, r.quantile)
		if err != nil {
			return nil, fmt.Errorf("profile the load: %w", err)
		}
		r.report.ProfiledBurst = need
		burst = max(burstFor(need, split), int64(r.brokers))
	}
	var wait time.Duration
	if split > 1 {
		wait = splitWait(scheduled(), rate, burst, split, r.quantile)
	}
	slo := r.slo
	if slo == 0 {
		slo = sloFor(r.machine, wait)
		r.report.SLODerived = true
	}
	r.report.RateMilli, r.report.Burst, r.report.SLOUs = int64(rate), burst, slo.Microseconds()
	r.report.SplitOver, r.report.MachineUs, r.report.SplitUs = split, r.machine.Microseconds(), wait.Microseconds()
	return &srtmv1.Contract{RateMilli: int64(rate), Burst: burst, Slo: r.sloProto(slo)}, nil
}

func (r *run) sloProto(latency time.Duration) *srtmv1.Slo {
	return &srtmv1.Slo{Quantile: r.quantile, Latency: durationpb.New(latency)}
}

// topicSpec declares the load's publishers. The share rule is static, because a rule that
// changes shares would compensate for a bad placement.
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

type phaseSpec struct {
	name, title string
	spec        *srtmv1.TopicSpec
	duration    time.Duration
	file        string
	live        bool // show the table
}

// phase creates a topic, sends, and deletes the topic. A result comes with an error if
// there is still something to report.
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
		// Also after ctx has ended: the topic would take room from the next phase.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
		defer cancel()
		if _, deleteErr := r.admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: p.spec.Name}); deleteErr != nil {
			err = errors.Join(err, fmt.Errorf("delete topic %s: %w", p.spec.Name, deleteErr))
		}
	}()

	if p.live {
		if result.OnTime, err = r.onTime(ctx, topic, p.duration); err != nil {
			return nil, fmt.Errorf("placement of topic %s: %w", p.spec.Name, err)
		}
	}
	pressed := pressure()
	began := time.Now()
	e, err := startEmulator(r.cluster, r.binDir, r.dataDir, job{
		name: p.file, topic: p.spec.Name, load: r.options.load, duration: p.duration,
	})
	if err != nil {
		return nil, err
	}
	rep, err := e.wait(ctx, r.cluster.Died, func() {
		progress := e.progress()
		if progress == nil || progress.ElapsedSeconds > p.duration.Seconds() {
			return // the emulator is connecting or draining
		}
		if t := r.status(ctx, p.spec.Name); t != nil {
			result.observe(t.Status)
			if p.live {
				r.view.draw(&frame{title: p.title, duration: p.duration, progress: progress, topic: t, brokers: r.brokers})
			}
		}
	})
	r.view.done(p.title)
	if err != nil {
		return nil, err
	}
	result.Emulator = *rep
	if after := pressure(); pressed >= 0 && after >= pressed {
		waited := min(1, float64(after-pressed)/float64(time.Since(began)))
		result.Pressure = &waited
	}
	return result, nil
}

// onTime computes the waits for tokens of a phase's messages, as placed, if each were
// sent on time.
func (r *run) onTime(ctx context.Context, topic *srtmv1.Topic, phase time.Duration) (*OnTime, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	stream, err := srtmv1.NewPlacementServiceClient(r.cluster.Conn).Watch(ctx, &srtmv1.WatchRequest{Topic: topic.Spec.Name})
	if err != nil {
		return nil, err
	}
	brokerOf := map[string]string{} // brokers by publisher
	for more := true; more; {
		m, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		for _, a := range m.Assignments {
			brokerOf[a.PublisherId] = a.BrokerId
		}
		more = m.More
	}
	share := map[string]int{}
	var shares []tokenbucket.Share
	for i, q := range topic.Quotas {
		share[q.BrokerId] = i
		shares = append(shares, service.ShareOf(q.GetShare()))
	}
	where := make([]int, len(r.load.Sources))
	for i, source := range r.load.Sources {
		at, placed := share[brokerOf[source.ID]]
		if !placed {
			return nil, fmt.Errorf("publisher %s has no broker", source.ID)
		}
		where[i] = at
	}
	delays := access(schedule.Until(r.load.Stream(), phase), shares, func(source int32) int { return where[source] })
	return &OnTime{Access: report.QuantilesOf(delays), Late: delays.CountAbove(r.report.slo())}, nil
}

// pressure returns the total time since boot in which some process waited for a
// processor; negative if the kernel does not report it.
func pressure() time.Duration {
	text, err := os.ReadFile("/proc/pressure/cpu")
	if err != nil {
		return -1
	}
	var us int64
	_, total, _ := strings.Cut(string(text), "total=")
	if _, err := fmt.Sscan(total, &us); err != nil {
		return -1
	}
	return time.Duration(us) * time.Microsecond
}

func (r *run) create(ctx context.Context, spec *srtmv1.TopicSpec) (*srtmv1.Topic, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for {
		topic, err := topics.Create(ctx, r.admin, &srtmv1.CreateTopicRequest{Spec: spec}, nil)
		// Brokers of the previous phase may not have confirmed the end of its topic yet.
		if service.Reason(err) != "CONTRACT_BUSY" || !clock.Sleep(ctx, busyPause) {
			return topic, err
		}
	}
}

const busyPause = 100 * time.Millisecond

// status returns a topic with its stats, or nil if the request fails.
func (r *run) status(ctx context.Context, name string) *srtmv1.Topic {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	resp, err := r.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: name, OmitPublishers: true})
	if err != nil {
		return nil // the next second brings another status; Died reports a dead cluster
	}
	return resp.Topic
}
