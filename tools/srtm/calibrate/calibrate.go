package calibrate

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/tools/iotpub/emulate"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/srtm/calibrate/search"
)

// Config configures a calibration.
type Config struct {
	// TCP and HTTP are the broker's addresses, host:port.
	TCP, HTTP string
	// TLS configures connections to the broker; nil: without TLS.
	TLS    *tls.Config
	SLO    search.SLO
	Search search.Config
	// Connections is the number of publishers, each with its own connection. Size is the
	// message size in bytes.
	Connections, Size int
	// A step sends a rate for Settle, and then for Step, which is measured. If Step
	// brings too few messages to judge, the measurement is longer, up to maxStretch
	// times.
	Settle, Step time.Duration
	// Limit is the maximum duration of the calibration: no step begins that may not end
	// within it.
	Limit time.Duration
	// Force allows measuring a broker with other topics.
	Force bool
	// Workers is the number of sending threads.
	Workers int
	Seed    uint64
	Logger  *slog.Logger
	// Create creates a topic without a limit on the broker, and Remove deletes the topic.
	// They are set for a broker in a cluster, where clients cannot create topics. nil:
	// clients create ephemeral topics on the broker.
	Create, Remove func(ctx context.Context, topic string) error
}

// maxStretch is the maximum length of a measurement, as a multiple of Config.Step.
const maxStretch = 10

// Limits of the rest of a step: connecting, the last deliveries, and removing the topic.
const (
	connectTimeout = 10 * time.Second
	drainTimeout   = 3 * time.Second
	cleanTimeout   = 5 * time.Second
)

// Validate returns all faults of c.
func (c Config) Validate() error {
	var f faults.List
	f.Add(c.Search.Validate())
	for _, a := range []string{c.TCP, c.HTTP} {
		_, _, err := net.SplitHostPort(a)
		f.If(err != nil, "address %q: want host:port", a)
	}
	f.If(!(c.SLO.Quantile > 0 && c.SLO.Quantile <= 0.9999), "SLO quantile %v: want above 0 and up to 0.9999", c.SLO.Quantile)
	if err := topics.CheckLatency(c.SLO.Latency); err != nil {
		f.If(true, "--slo-latency: %w", err)
	}
	f.If(c.Settle < 100*time.Millisecond || c.Settle > time.Minute, "settling for %v: want 100ms to 1m", c.Settle)
	f.If(c.Step < 100*time.Millisecond || c.Step > time.Minute, "steps of %v: want 100ms to 1m", c.Step)
	f.If(c.Limit < c.Settle+c.Step, "a limit of %v is less than a step takes", c.Limit)
	f.If(c.Workers < 1, "%d workers: want 1 or more", c.Workers)
	f.Add(c.spec(c.Search.First).Validate())
	if len(f) == 0 {
		minimum := float64(c.SLO.MinDeliveries()) / (maxStretch * c.Step.Seconds())
		f.If(float64(c.Search.Least) < minimum, "%d msg/s in %v are too few messages for the SLO's quantile: want %.0f msg/s or more, or longer steps",
			c.Search.Least, maxStretch*c.Step, math.Ceil(minimum))
	}
	return f.Err()
}

// spec returns the load for a rate.
func (c Config) spec(rate int64) schedule.Spec {
	return schedule.Spec{
		Publishers: c.Connections, Rate: float64(rate) / float64(max(1, c.Connections)), Batch: 1,
		Process: schedule.Poisson, Size: c.Size, Seed: c.Seed,
	}
}

// measured returns how long a rate is measured.
func (c Config) measured(rate int64) time.Duration {
	need := time.Duration(1.2 * float64(c.SLO.MinDeliveries()) / float64(rate) * float64(time.Second))
	return min(max(c.Step, need), maxStretch*c.Step)
}

// Step is the try of one rate.
type Step struct {
	Rate    int64          `json:"rate"` // msg/s
	Outcome search.Outcome `json:"outcome"`
	Why     string         `json:"why,omitempty"`
	// Offered is the achieved offered rate, msg/s.
	Offered   float64 `json:"offered_per_s"`
	Delivered int64   `json:"delivered"`
	Exceeded  int64   `json:"exceeded"`
	// Delay is the broker's delivery latency and Late the generator's send delay, at the
	// SLO's quantile.
	Delay micros `json:"delay_us"`
	Late  micros `json:"late_us"`
}

// micros is a duration in whole microseconds in JSON.
type micros time.Duration

func (m micros) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "%d", time.Duration(m).Microseconds()), nil
}

func (m micros) String() string { return time.Duration(m).Round(time.Microsecond).String() }

// Limit says why the search did not reach a higher rate.
type Limit string

const (
	// LimitBroker: the broker missed the SLO. Only then is the mcap known exactly.
	LimitBroker Limit = "broker"
	// LimitGenerator: the generator could not send more. The mcap may be higher than
	// reported.
	LimitGenerator Limit = "generator"
	// LimitMost: Search.Most was reached. The mcap may be higher than reported.
	LimitMost Limit = "most"
	// LimitTime: the time or the steps ran out. The reported rate was kept only once, or
	// a higher rate may be kept.
	LimitTime Limit = "time"
)

// Result is the result of a calibration.
type Result struct {
	// Mcap is the maximum rate that kept the SLO, msg/s; 0 if none did.
	Mcap int64 `json:"mcap"`
	// Over is the lowest rate above Mcap that was not kept, 0 if there is none.
	Over  int64  `json:"over"`
	Limit Limit  `json:"limit"`
	Steps []Step `json:"steps"`
}

// Known reports whether the search was completed: the broker kept Mcap twice.
func (r *Result) Known() bool { return r.Mcap > 0 && r.Limit != LimitTime }

// CarriesError means that the broker has topics that the load would disturb.
type CarriesError struct{ Topics []string }

func (e *CarriesError) Error() string {
	const shown = 5
	names := e.Topics
	more := ""
	if len(names) > shown {
		names, more = names[:shown], fmt.Sprintf(" and %d more", len(e.Topics)-shown)
	}
	return "the broker carries " + strings.Join(names, ", ") + more
}

var (
	// ErrNothingKept: not even the minimum rate kept the SLO, or could be sent.
	ErrNothingKept = errors.New("not even the minimum rate was kept")
	// ErrNoTime: the time or the steps ran out before a rate was kept.
	ErrNoTime = errors.New("no rate kept the SLO within --limit and --steps; allow more, or run calibrate on another machine")
)

// Run calibrates. It calls each after every step, on this goroutine. With ErrNothingKept
// and ErrNoTime the result lists the tries. With any other error, and when ctx ends,
// there is no result. Run removes its topics before it returns, if the broker is still
// there.
//
// Requires: cfg is valid.
func Run(ctx context.Context, cfg Config, each func(Step)) (*Result, error) {
	r, done, err := newRunner(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer done()
	began := time.Now()
	s := search.New(cfg.Search)
	result := &Result{Steps: []Step{}}
	for {
		rate, more := s.Next()
		if !more {
			break
		}
		if time.Since(began)+cfg.Settle+cfg.measured(rate)+drainTimeout > cfg.Limit {
			break
		}
		step, err := r.step(ctx, rate)
		if err != nil {
			return nil, fmt.Errorf("at %d msg/s: %w", rate, err)
		}
		s.Record(rate, step.Outcome)
		result.Steps = append(result.Steps, step)
		each(step)
	}
	var sure bool
	result.Mcap, sure = s.Kept()
	over, why := s.Over()
	result.Over = over
	_, more := s.Next()
	switch {
	case result.Mcap > 0 && (!sure || more):
		result.Limit = LimitTime
	case over == 0 && result.Mcap > 0:
		result.Limit = LimitMost
	case over == 0 || result.Mcap == 0 && over > cfg.Search.Least:
		result.Limit = LimitTime
	case why == search.Unoffered:
		result.Limit = LimitGenerator
	default:
		result.Limit = LimitBroker
	}
	switch {
	case result.Mcap > 0:
		return result, nil
	case result.Limit == LimitTime:
		return result, ErrNoTime
	}
	return result, ErrNothingKept
}

type runner struct {
	cfg    Config
	id     uint64 // random, part of the topic names
	broker broker
	steps  int
}

// newRunner returns a runner for a broker without other topics. done releases the runner.
func newRunner(ctx context.Context, cfg Config) (_ *runner, done func(), err error) {
	done = func() {}
	if cfg.TLS != nil {
		t, err := newTunnel(cfg.TCP, cfg.TLS)
		if err != nil {
			return nil, nil, err
		}
		done = t.Close
		cfg.TCP = t.Address()
	}
	r := &runner{cfg: cfg, id: new(maphash.Hash).Sum64() >> 32, broker: broker{cfg.HTTP, cfg.TLS}} // each Hash has its own random seed
	if _, err := r.others(ctx); err != nil {
		done()
		return nil, nil, err
	}
	return r, done, nil
}

// prefix begins the names of the calibration's topics.
const prefix = "srtm-calibrate-"

// others returns the stats of all topics. If the broker has topics of others and Force is
// not set, the error is a *CarriesError.
func (r *runner) others(ctx context.Context) ([]topicStats, error) {
	all, err := r.broker.topics(ctx)
	if err != nil {
		return nil, err
	}
	ours := fmt.Sprintf("%s%08x-", prefix, r.id)
	var names []string
	for _, t := range all {
		if !strings.HasPrefix(t.Name, ours) {
			names = append(names, t.Name)
		}
	}
	if len(names) > 0 && !r.cfg.Force {
		slices.Sort(names)
		return all, &CarriesError{names}
	}
	return all, nil
}

// stats returns the stats of the topic. Errors are as in others.
func (r *runner) stats(ctx context.Context, topic string) (topicStats, error) {
	all, err := r.others(ctx)
	if err != nil {
		return topicStats{}, err
	}
	for _, t := range all {
		if t.Name == topic {
			return t, nil
		}
	}
	return topicStats{}, fmt.Errorf("the broker has lost topic %s", topic)
}

func (r *runner) step(ctx context.Context, rate int64) (Step, error) {
	spec := r.cfg.spec(rate)
	spec.Seed += uint64(r.steps + 1)
	m, err := r.measure(ctx, spec, r.cfg.measured(rate))
	if err != nil {
		return Step{}, err
	}
	late := m.Lateness.At(r.cfg.SLO.Quantile)
	e := search.Evidence{
		Skipped: m.Skipped, Held: m.Held, Unanswered: m.Unanswered, Refused: m.RefusedTotal(), Lost: m.Lost,
		Late: late, Delivered: m.delivery.Count(), Exceeded: m.delivery.CountAbove(r.cfg.SLO.Latency),
	}
	if m.Account != nil {
		e.Undelivered = m.Account.Lost
	}
	step := Step{
		Rate: rate, Offered: m.OfferedRate, Delivered: e.Delivered, Exceeded: e.Exceeded,
		Delay: micros(m.delivery.Quantile(r.cfg.SLO.Quantile)), Late: micros(late),
	}
	step.Outcome, step.Why = r.cfg.SLO.Judge(e)
	return step, nil
}

// measurement is the outcome of a load.
type measurement struct {
	*report.Report                    // the generator's
	delivery       *histogram.Latency // the broker's delivery latencies
}

// measure sends a load on a new topic, and measures for the given time after the load has
// settled.
func (r *runner) measure(ctx context.Context, spec schedule.Spec, measured time.Duration) (m *measurement, err error) {
	r.steps++
	topic := fmt.Sprintf("%s%08x-%d", prefix, r.id, r.steps)
	remove := r.cfg.Remove
	if r.cfg.Create == nil {
		topic, remove = topic+"#ephemeral", r.broker.remove
	}
	l, err := load.Options{Spec: spec}.Build()
	if err != nil {
		return nil, err
	}
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
		defer cancel()
		err = errors.Join(err, remove(clean, topic))
	}()
	if r.cfg.Create != nil {
		if err := r.cfg.Create(ctx, topic); err != nil {
			return nil, fmt.Errorf("create %s: %w", topic, err)
		}
	}
	// An ephemeral topic exists until the holder is closed, even if this process is
	// killed.
	holder, err := hold(r.cfg.TCP, topic, channel)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release(holder)) }()

	var before topicStats
	var failed error
	settled := false
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	m = &measurement{}
	m.Report, err = emulate.Run(inner, emulate.Config{
		Load: load.Options{Spec: spec}, Duration: r.cfg.Settle + measured, Topic: topic, Nsqd: r.cfg.TCP,
		Subscribe: true, Channel: channel, Connect: connectTimeout, Drain: drainTimeout,
		Workers: r.cfg.Workers, MaxOutstanding: maxOutstanding, Heartbeat: 30 * time.Second, Interval: r.cfg.Settle, Logger: r.cfg.Logger,
	}, l, func(*report.Progress) {
		if settled {
			return
		}
		settled = true
		if before, failed = r.stats(ctx, topic); failed != nil {
			cancel(failed)
		}
	})
	switch {
	case failed != nil:
		return nil, failed
	case ctx.Err() != nil: // regardless of how far the load got
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, err
	case !settled:
		return nil, errors.New("it was over before it had settled")
	}
	after, err := r.stats(ctx, topic)
	if err != nil {
		return nil, err
	}
	m.delivery, err = since(before.Delivery, after.Delivery)
	return m, err
}

const (
	// channel of the calibration's subscriber.
	channel = "calibrate#ephemeral"
	// maxOutstanding is the number of missing answers at which a connection counts as
	// taking no more.
	maxOutstanding = 4096
)
