// Package scenario turns a scenario file into a simulation and a report. It reads brokers
// and their calibration, builds the load, profiles contracts, places publishers like the
// loaddistributor, runs tools/sim/engine and summarizes the result. Placement, shares and
// the SLO's statistic are the production's.
//
// spec.go has the file format, calibration.go the speed of brokers, build.go the
// preparation, run.go the run, report.go the report. fit.go runs a search of
// loaddistributor/tuner, like loaddistributor/controller does live.
package scenario

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/trace"
)

// Scenario is a scenario file. Times are in seconds or, where the name says so,
// milliseconds; rates in msg/s.
type Scenario struct {
	// Name appears in the report.
	Name string `json:"name,omitempty"`
	// Seed determines all random values. 0 means 1.
	Seed uint64 `json:"seed,omitempty"`
	// Duration is the measured time after Warmup; above 0. Messages count by their
	// arrival.
	Duration float64 `json:"duration_s"`
	Warmup   float64 `json:"warmup_s,omitempty"`
	// Calibration is the speed of brokers: "paper", the default, is built in, other
	// values are files.
	Calibration string   `json:"calibration,omitempty"`
	Brokers     []Broker `json:"brokers"`
	Topics      []Topic  `json:"topics"`
}

// Broker is one broker, or Count equal brokers: id "b" then stands for b1, b2, ...
type Broker struct {
	ID    string `json:"id"`
	Count int    `json:"count,omitempty"`
	// Model is a model of the calibration; "" is the default.
	Model string `json:"model,omitempty"`
	// Mcap is the maximum rate within the SLO; 0: the model's.
	Mcap int64 `json:"mcap,omitempty"`
	// Background is existing load: its rate counts as allocated, and no contract limits
	// it.
	Background *Load `json:"background,omitempty"`
	// Allocated is the allocated rate if it differs from the rate of Background: a
	// contract exceeds the mean rate.
	Allocated int64 `json:"allocated,omitempty"`
}

// Load is a fleet of equal publishers, or a recording.
type Load struct {
	Publishers int     `json:"publishers,omitempty"`
	Rate       float64 `json:"rate,omitempty"` // of each publisher
	// Batch is the number of messages sent back to back; 0 means 1.
	Batch     int  `json:"batch,omitempty"`
	GroupSize int  `json:"group_size,omitempty"`
	Sync      bool `json:"sync,omitempty"`
	// NoiseMs adds a uniform 0 to NoiseMs to the send times of synchronised groups.
	NoiseMs float64 `json:"noise_ms,omitempty"`
	// Process is "poisson" (the default) or "periodic".
	Process schedule.Process `json:"process,omitempty"`
	Trace   *Trace           `json:"trace,omitempty"`
}

// Grouped is the load of the paper's figures 9 to 11 and table 1: groups of publishers
// that send at the same instants, apart from the noise.
func Grouped(size int, process schedule.Process, noiseMs float64) Load {
	return Load{Publishers: 1000, Rate: 10, Batch: 10, GroupSize: size, Sync: true, NoiseMs: noiseMs, Process: process}
}

// Trace replays a recording; see tools/iotpub/trace.
type Trace struct {
	File     string  `json:"file"`
	Compress float64 `json:"compress,omitempty"` // 0 means 1
	Copies   int     `json:"copies,omitempty"`   // 0 means 1
	From     float64 `json:"from_s,omitempty"`
	To       float64 `json:"to_s,omitempty"`
	// SpreadMs is the recording's tick; nil means 100.
	SpreadMs *float64 `json:"spread_ms,omitempty"`
}

// Topic is a topic under a contract.
type Topic struct {
	Name string `json:"name"`
	Load
	Contract Contract `json:"contract"`
	SLO      SLO      `json:"slo"`
	// Policy is the placement policy, one of placement.Policies; "" is srtm.
	Policy string `json:"policy,omitempty"`
	// Keys selects the correlation keys for the placement: "declared", the default,
	// "learned" or "blind".
	Keys     string   `json:"keys,omitempty"`
	Learning Learning `json:"learning,omitzero"`
	// K is the number of brokers, those with the largest rcap, even if their mcap is too
	// small. 0: the policy decides.
	K int `json:"k,omitempty"`
	// AtLeast is the minimum number of brokers, within their mcap.
	AtLeast int    `json:"at_least,omitempty"`
	Adapt   *Adapt `json:"adapt,omitempty"`
}

// Contract is (r, b). Zero values are profiled from the first ProfileSeconds of the load,
// as in the paper: r is 1.1 times the mean rate, b the smallest burst for which a
// quantile of the access delay is 0.
type Contract struct {
	Rate  float64 `json:"rate,omitempty"`
	Burst int64   `json:"burst,omitempty"`
	// ProfileQuantile is this quantile; 0: the SLO's quantile, as in the paper. The SLO's
	// quantile leaves no margin: if a group does not divide evenly, more messages are
	// late than the SLO allows. A topic that will be split needs a margin.
	ProfileQuantile float64 `json:"profile_quantile,omitempty"`
	// Margin is added to the profiled b, as a fraction of b.
	Margin         float64 `json:"margin,omitempty"`
	ProfileSeconds float64 `json:"profile_s,omitempty"` // 0: warm-up and duration, at most 60
}

// SLO is a quantile of the delivery latency; zero values mean 0.99 and 1 ms.
type SLO struct {
	Quantile  float64 `json:"quantile,omitempty"`
	LatencyMs float64 `json:"latency_ms,omitempty"`
}

// Adapt makes shares follow the load, as tbadaptor does.
type Adapt struct {
	Rule string `json:"rule"`
	// Zero values mean 1 s, 10 steps and 1 step.
	Step   float64 `json:"step_s,omitempty"`
	Window int     `json:"window,omitempty"`
	Every  int     `json:"every,omitempty"`
}

// Limits of a scenario.
const (
	MaxSeconds = 1e6
	// MaxMessages limits the simulated messages, except of traces: a day's work.
	MaxMessages = 1e11
	MaxBrokers  = 100_000
	maxSize     = 64 << 20
)

// Read parses and validates a scenario. Unknown fields are faults. The error has all
// faults.
func Read(r io.Reader) (*Scenario, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxSize+1))
	if err != nil {
		return nil, fmt.Errorf("read the scenario: %w", err)
	}
	if len(text) > maxSize {
		return nil, fmt.Errorf("the scenario has more than %d bytes", maxSize)
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	s := &Scenario{}
	if err := dec.Decode(s); err != nil {
		return nil, fmt.Errorf("scenario: %w", err)
	}
	if dec.More() {
		return nil, errors.New("scenario: more than one JSON value")
	}
	if err := s.Complete(); err != nil {
		return nil, err
	}
	return s, nil
}

// ReadFile reads a file. Every error names the file.
func ReadFile(name string) (*Scenario, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err // err names the file
	}
	defer f.Close() // only read
	s, err := Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return s, nil
}

// Complete fills in the defaults and validates.
func (s *Scenario) Complete() error {
	s.fill()
	return s.Validate()
}

// New builds a scenario that was not read from a file, with defaults.
func New(s Scenario) (*Built, error) {
	if err := s.Complete(); err != nil {
		return nil, err
	}
	return Build(&s)
}

func (s *Scenario) fill() {
	setDefault(&s.Seed, 1)
	setDefault(&s.Calibration, Paper)
	for i := range s.Brokers {
		b := &s.Brokers[i]
		if b.Background != nil {
			b.Background.fill()
		}
	}
	for i := range s.Topics {
		t := &s.Topics[i]
		t.Load.fill()
		setDefault(&t.Policy, placement.SRTM)
		setDefault(&t.Keys, Declared)
		setDefault(&t.Learning.Seconds, 60)
		setDefault(&t.SLO.Quantile, 0.99)
		setDefault(&t.SLO.LatencyMs, 1)
		setDefault(&t.Contract.ProfileQuantile, t.SLO.Quantile)
		setDefault(&t.Contract.ProfileSeconds, min(60, s.Warmup+s.Duration))
		if a := t.Adapt; a != nil {
			setDefault(&a.Step, 1)
			setDefault(&a.Window, 10)
			setDefault(&a.Every, 1)
		}
	}
}

func (l *Load) fill() {
	setDefault(&l.Batch, 1)
	setDefault(&l.Process, schedule.Poisson)
	if t := l.Trace; t != nil {
		setDefault(&t.Compress, 1)
		setDefault(&t.Copies, 1)
		if t.SpreadMs == nil {
			tick := float64(trace.DefaultSpread) / float64(time.Millisecond)
			t.SpreadMs = &tick
		}
	}
}

// setDefault sets *v to the default if *v is zero.
func setDefault[T comparable](v *T, value T) {
	if *v == *new(T) {
		*v = value
	}
}

// Validate returns every fault at once, joined, or nil. Requires: defaults are filled in,
// as by Read.
func (s *Scenario) Validate() error {
	var f faults.List
	f.If(!(s.Duration > 0 && s.Duration <= MaxSeconds), "duration_s: %v is not above 0, up to %g", s.Duration, MaxSeconds)
	f.If(!(s.Warmup >= 0 && s.Warmup <= MaxSeconds), "warmup_s: %v is not in 0 to %g", s.Warmup, MaxSeconds)
	f.If(len(s.Brokers) == 0, "brokers: there is none")
	n, messages := 0, 0.0
	ids := map[string]bool{}
	for i, b := range s.Brokers {
		path := fmt.Sprintf("brokers[%d]", i)
		f.If(b.ID == "", "%s.id: is empty", path)
		if b.Count < 0 || b.Count > MaxBrokers {
			f.If(true, "%s.count: %d is not in 0 to %d", path, b.Count, MaxBrokers)
			continue
		}
		for _, id := range b.names() {
			if ids[id] {
				f.If(true, "%s.id: there are two brokers %q", path, id)
				break
			}
			ids[id] = true
		}
		n += max(1, b.Count)
		f.If(b.Mcap < 0, "%s.mcap: %d is negative", path, b.Mcap)
		f.If(b.Allocated < 0, "%s.allocated: %d is negative", path, b.Allocated)
		if b.Background != nil {
			b.Background.validate(&f, path+".background")
			messages += float64(max(1, b.Count)) * b.Background.messages(s.Warmup+s.Duration)
		}
	}
	f.If(n > MaxBrokers, "brokers: %d, at most %d", n, MaxBrokers)
	f.If(len(s.Topics) == 0, "topics: there is none")
	names := map[string]bool{}
	for i, t := range s.Topics {
		path := fmt.Sprintf("topics[%d]", i)
		f.If(t.Name == "" || names[t.Name], "%s.name: %q is empty or not its own", path, t.Name)
		names[t.Name] = true
		t.validate(&f, path, n)
		messages += t.messages(s.Warmup + s.Duration)
	}
	f.If(messages > MaxMessages, "%.3g messages, want %g at most", messages, MaxMessages)
	return f.Err()
}

// messages estimates the messages in the given seconds; 0 for a trace.
func (l Load) messages(seconds float64) float64 { return float64(l.Publishers) * l.Rate * seconds }

// names returns the ids of the brokers that b stands for.
func (b Broker) names() []string {
	if b.Count == 0 {
		return []string{b.ID}
	}
	names := make([]string, b.Count)
	for i := range names {
		names[i] = fmt.Sprintf("%s%d", b.ID, i+1)
	}
	return names
}

// validate adds the topic's faults. at is the topic's place in the file.
func (t Topic) validate(f *faults.List, path string, brokers int) {
	refuse := func(wrong bool, format string, args ...any) { f.If(wrong, path+"."+format, args...) }
	t.Load.validate(f, path)
	refuse(!slices.Contains(placement.Policies(), t.Policy), "policy: %q is not one of %v", t.Policy, placement.Policies())
	refuse(!slices.Contains([]string{Declared, Learned, Blind}, t.Keys), "keys: %q is none of %s, %s and %s", t.Keys, Declared, Learned, Blind)
	g := t.Learning
	refuse(!(g.Seconds > 0 && g.Seconds <= MaxSeconds), "learning.seconds: %v is not above 0, up to %g", g.Seconds, MaxSeconds)
	refuse(t.Keys == Learned && t.Trace != nil && !(g.From >= 0 && g.To > g.From && g.To <= 1e9), "learning: from %v s to %v s of a trace", g.From, g.To)
	refuse(t.K < 0 || t.K > brokers, "k: %d of %d brokers", t.K, brokers)
	refuse(t.AtLeast < 0 || t.AtLeast > 0 && t.K > 0, "at_least: %d brokers, and k is %d", t.AtLeast, t.K)
	c := t.Contract
	refuse(!(c.Rate >= 0 && c.Rate <= tokenbucket.MaxRate.PerSecond()) || c.Burst < 0 || c.Burst > tokenbucket.MaxBurst, "contract: rate %v, burst %d", c.Rate, c.Burst)
	refuse(!(c.ProfileQuantile > 0 && c.ProfileQuantile <= 1), "contract.profile_quantile: %v is not above 0, up to 1", c.ProfileQuantile)
	refuse(!(c.Margin >= 0 && c.Margin <= 1000), "contract.margin: %v is not in 0 to 1000", c.Margin)
	refuse(!(c.ProfileSeconds > 0 && c.ProfileSeconds <= MaxSeconds), "contract.profile_s: %v is not above 0, up to %g", c.ProfileSeconds, MaxSeconds)
	refuse(!(t.SLO.Quantile > 0 && t.SLO.Quantile < 1), "slo.quantile: %v is not between 0 and 1", t.SLO.Quantile)
	refuse(!(t.SLO.LatencyMs > 0 && t.SLO.LatencyMs <= 1e6), "slo.latency_ms: %v is not above 0, up to 1e6", t.SLO.LatencyMs)
	if a := t.Adapt; a != nil {
		refuse(!slices.Contains(share.Rules(), a.Rule), "adapt.rule: %q is not one of %v", a.Rule, share.Rules())
		refuse(!(a.Step >= 1e-3 && a.Step <= 3600) || a.Window < 1 || a.Window > 10_000 || a.Every < 1 || a.Every > 10_000,
			"adapt: steps of %v s, a window of %d, every %d steps: want 0.001 to 3600, 1 to 10000", a.Step, a.Window, a.Every)
	}
}

func (l Load) validate(f *faults.List, path string) {
	if t := l.Trace; t != nil {
		f.If(l.Publishers != 0 || l.Rate != 0 || l.GroupSize != 0 || l.Sync || l.NoiseMs != 0, "%s: a trace brings its own publishers", path)
		f.If(t.File == "", "%s.trace.file: is empty", path)
		for _, s := range []float64{t.From, t.To, *t.SpreadMs} {
			if !(s >= 0 && s <= 1e9) {
				f.If(true, "%s.trace: %v is not a time in 0 to 1e9", path, s)
				return
			}
		}
		err := t.options(1).Validate()
		f.If(err != nil, "%s.trace: %w", path, err)
		return
	}
	if !(math.Abs(l.NoiseMs) <= 1e6) {
		f.If(true, "%s.noise_ms: %v", path, l.NoiseMs)
		return
	}
	err := l.spec(1).Validate()
	f.If(err != nil, "%s: %w", path, err)
}

// spec requires that l is not a trace.
func (l Load) spec(seed uint64) schedule.Spec {
	return schedule.Spec{
		Publishers: l.Publishers, Rate: l.Rate, Batch: l.Batch, GroupSize: l.GroupSize, Sync: l.Sync,
		Noise: duration(l.NoiseMs / 1000), Process: l.Process, Seed: seed,
	}
}

func (t *Trace) options(seed uint64) trace.Options {
	return trace.Options{
		Compress: t.Compress, Copies: t.Copies, From: duration(t.From), To: duration(t.To),
		Spread: duration(*t.SpreadMs / 1000), Seed: seed,
	}
}

func duration(seconds float64) time.Duration { return time.Duration(math.Round(seconds * 1e9)) }
