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
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/tools/iotpub/emulate"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/srtm/calibrate/search"
)

// Config is one calibration.
type Config struct {
	// TCP and HTTP are the broker's addresses, host:port.
	TCP, HTTP string
	// TLS is what it is spoken to with; nil: in clear.
	TLS    *tls.Config
	SLO    search.SLO
	Search search.Config
	// Connections is how many publishers there are, each with its own; Size that
	// of a message in bytes.
	Connections, Size int
	// A rate is sent for Settle, and then for Step, which is measured, or for
	// longer where Step brings too few messages to judge, up to maxStretch times.
	Settle, Step time.Duration
	// Limit bounds all of it: no step begins that may not end within it.
	Limit time.Duration
	// Force measures a broker that carries topics, too.
	Force bool
	// Workers is the number of threads that send.
	Workers int
	Seed    uint64
	Logger  *slog.Logger
	// Create makes a topic on the broker that lets everything through, and Remove
	// deletes it, where clients cannot: in a cluster. nil: the broker creates topics,
	// ephemeral ones.
	Create, Remove func(ctx context.Context, topic string) error
}

// maxStretch is how much longer than Config.Step a step may take.
const maxStretch = 10

// Bounds of what a step takes besides: to connect, and to get what is missing.
const (
	connectTimeout = 10 * time.Second
	drainTimeout   = 3 * time.Second
	cleanTimeout   = 5 * time.Second
)

// Validate returns all that is wrong with c.
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

// spec is the load of a rate.
func (c Config) spec(rate int64) schedule.Spec {
	return schedule.Spec{
		Publishers: c.Connections, Rate: float64(rate) / float64(max(1, c.Connections)), Batch: 1,
		Process: schedule.Poisson, Size: c.Size, Seed: c.Seed,
	}
}

// measured is how long a rate is measured.
func (c Config) measured(rate int64) time.Duration {
	need := time.Duration(1.2 * float64(c.SLO.MinDeliveries()) / float64(rate) * float64(time.Second))
	return min(max(c.Step, need), maxStretch*c.Step)
}

// Step is a rate that was tried.
type Step struct {
	Rate    int64          `json:"rate"` // msg/s
	Outcome search.Outcome `json:"outcome"`
	Why     string         `json:"why,omitempty"`
	// Offered is what was, msg/s.
	Offered   float64 `json:"offered_per_s"`
	Delivered int64   `json:"delivered"`
	Exceeded  int64   `json:"exceeded"`
	// Delay is the broker's delivery latency, Late how late the generator was, at
	// the SLO's quantile.
	Delay micros `json:"delay_us"`
	Late  micros `json:"late_us"`
}

// micros is a duration that is whole microseconds in JSON.
type micros time.Duration

func (m micros) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "%d", time.Duration(m).Microseconds()), nil
}

func (m micros) String() string { return time.Duration(m).Round(time.Microsecond).String() }

// Limit is what kept the search from a greater rate.
type Limit string

const (
	// LimitBroker: it missed the SLO. The only one with which the mcap is known.
	LimitBroker Limit = "broker"
	// LimitGenerator: it could not send more. The mcap is at least what is said.
	LimitGenerator Limit = "generator"
	// LimitMost: no more was to be tried. Likewise.
	LimitMost Limit = "most"
	// LimitTime: there was no time, or no step, left. What is said was kept, but
	// not when asked again, or a greater one may be.
	LimitTime Limit = "time"
)

// Result is what was found.
type Result struct {
	// Mcap is the maximum rate that kept the SLO, msg/s; 0: none did.
	Mcap int64 `json:"mcap"`
	// Over is the lowest one above it that was not kept, 0 if there is none.
	Over  int64  `json:"over"`
	Limit Limit  `json:"limit"`
	Steps []Step `json:"steps"`
}

// Known reports whether the search came to its end: the broker was asked Mcap
// twice.
func (r *Result) Known() bool { return r.Mcap > 0 && r.Limit != LimitTime }

// CarriesError: the broker has topics that the load would disturb.
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
	// ErrNoTime: there was no time, or no step, left before a rate was kept.
	ErrNoTime = errors.New("no rate was kept in the time, or the steps, that there were")
)

// Run measures. each is told every step, from this goroutine. With ErrNothingKept and
// ErrNoTime the result says what was tried; with any other error, and when ctx ends,
// there is none. Topics of its own are gone when it returns, if the broker is not.
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
	id     uint64 // of this run, in names
	broker broker
	steps  int
}

// newRunner returns one for a broker without other topics; done releases it.
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
	r := &runner{cfg: cfg, id: new(maphash.Hash).Sum64() >> 32, broker: broker{cfg.HTTP, cfg.TLS}} // each Hash has a seed of its own
	if _, err := r.others(ctx); err != nil {
		done()
		return nil, nil, err
	}
	return r, done, nil
}

// prefix begins the names of our topics.
const prefix = "srtm-calibrate-"

// others returns the stats of all topics that are not ours, and a *CarriesError
// if there are any and that matters.
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

// stats returns those of the topic, and fails like others.
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

// step tries a rate.
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
	*report.Report              // the generator's
	delivery       *obs.Latency // the broker's delivery latencies
}

// measure sends a load on a topic of its own, and measures it for so long after it
// has settled.
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
	// An ephemeral one is there until the holder is closed, also if this process is
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
	case ctx.Err() != nil: // however far it came
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
	// channel of our subscriber.
	channel = "calibrate#ephemeral"
	// maxOutstanding is how many answers a connection may owe before it counts as
	// one that takes no more.
	maxOutstanding = 4096
)
