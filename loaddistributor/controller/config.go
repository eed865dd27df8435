package controller

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/shortage"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Defaults of Config.
const (
	DefaultReportInterval = time.Second
	DefaultPrepareTimeout = 5 * time.Second
	DefaultWindow         = 10 * time.Second
	// DefaultConsumerWait is how long a move waits for consumers. A library that looks
	// the topic up when a connection ends needs milliseconds, and the broker's report up
	// to a second. go-nsq may leave a new connection without RDY for 5 s, until its other
	// connections have less. The wait is too short for a consumer that polls lookups at
	// an interval, usually a minute.
	DefaultConsumerWait = 8 * time.Second
	// DefaultThreshold reports a lack of brokers only when a topic finds no room, or when
	// a disconnected broker's topics find none.
	DefaultThreshold = 1.0
)

// Config is fixed at start.
type Config struct {
	// Interval of the brokers' reports and of the controller's comparisons.
	ReportInterval time.Duration
	// Timeout of a step of a creation or deletion: all brokers prepare, or the adaptor
	// settles.
	PrepareTimeout time.Duration
	// Length of the sliding window over the reports.
	Window time.Duration
	// How long a broker may be disconnected before its publishers are placed elsewhere;
	// 0: DefaultEvacuateAfter.
	EvacuateAfter time.Duration
	// How long a broker may be disconnected before another broker takes over its
	// replicated topics; < 0: for ever.
	TakeOverAfter time.Duration
	// How long a move waits for consumers to connect to the topic's new brokers; 0:
	// DefaultConsumerWait.
	ConsumerWait time.Duration
	// How long a broker's id belongs to a silent process that may be alive; 0:
	// DefaultIDLease.
	IDLease time.Duration
	// Probe finds out whether a broker's process has ended; nil: the controller never
	// knows.
	Probe Probe
	// Handling of proposed moves away from overloaded brokers, and the rules for when a
	// move is due. Validate checks the rules unless Rebalance is off.
	Rebalance      Rebalance
	RebalanceRules tuner.RebalanceConfig
	// If the catalog was empty at the start: how long after the first broker has joined
	// no topic is denied, because other brokers may hold it. 0: no delay.
	Grace time.Duration
	// Address where brokers get their grants, host:port; empty: the address where they
	// reach the loaddistributor.
	GrantAddress string
	// ForwardKey authenticates brokers to each other for forwarding; empty: brokers do
	// not forward.
	ForwardKey []byte
	// Fitting is the mode for fitting new topics: tuner.ModeFast, tuner.ModePaper, or
	// empty for no fitting. FittingRound is the length of a round in ModePaper; 0:
	// tuner.DefaultRound.
	Fitting      string
	FittingRound time.Duration
	// TenantRates limit the sum of a tenant's contracts. "*" applies to tenants that are
	// not listed.
	TenantRates map[string]tokenbucket.Rate
	// Threshold is the part of the brokers' capacity that topics may use before another
	// broker is needed, above 0 and at most 1; 0: DefaultThreshold. Lacking receives the
	// number of brokers needed when the number has changed, and once after the start. It
	// must not wait. nil: only the log and the metric show the number.
	Threshold float64
	Lacking   func(shortage.Need)
	// Seed of the placement policies that draw publishers at random.
	Seed uint64
	// Journal stores the committed events, and Catalog is the state from earlier events.
	// If both are nil, the state lasts only as long as the process. New takes ownership
	// of the catalog.
	Journal Journal
	Catalog *catalog.Catalog
	// Traces receive a span for each operation on a topic and for each fit; nil: no
	// spans.
	Traces trace.TracerProvider
	// Followed means that other processes follow this one. Their watchers are unknown
	// here, so all publishers count as watched.
	Followed bool
	Log      *slog.Logger
	Metrics  prometheus.Registerer // nil: not exported
}

// Validate returns all problems at once, by the names of the loaddistributor's flags.
func (c Config) Validate() error {
	var errs []error
	for _, d := range []struct {
		name     string
		value    time.Duration
		min, max time.Duration
	}{
		{"--report-interval", c.ReportInterval, 10 * time.Millisecond, time.Minute},
		{"--prepare-timeout", c.PrepareTimeout, time.Millisecond, time.Hour},
		{"--consumer-wait", cmp.Or(c.ConsumerWait, DefaultConsumerWait), time.Millisecond, time.Hour},
		{"--flex-lease and --clock-bound together", cmp.Or(c.IDLease, DefaultIDLease), time.Millisecond, 24 * time.Hour},
		{"--evacuate-after", cmp.Or(c.EvacuateAfter, DefaultEvacuateAfter), 10 * time.Millisecond, 24 * time.Hour},
	} {
		if d.value < d.min || d.value > d.max {
			errs = append(errs, fmt.Errorf("%s %v: want %v to %v", d.name, d.value, d.min, d.max))
		}
	}
	if c.Window < max(c.ReportInterval, 10*time.Millisecond) || c.Window > time.Hour {
		errs = append(errs, fmt.Errorf("--window %v: want 10ms to 1h, and at least the %v of --report-interval", c.Window, c.ReportInterval))
	}
	if c.Rebalance != RebalanceOff {
		errs = append(errs, c.RebalanceRules.Validate())
	}
	if c.Fitting != "" && c.Fitting != tuner.ModeFast && c.Fitting != tuner.ModePaper {
		errs = append(errs, fmt.Errorf("--fitting %q: want %q, %q, or none", c.Fitting, tuner.ModeFast, tuner.ModePaper))
	}
	if round := cmp.Or(c.FittingRound, tuner.DefaultRound); round < c.ReportInterval || round > time.Hour {
		errs = append(errs, fmt.Errorf("--fitting-round %v: want the %v of --report-interval to 1h", round, c.ReportInterval))
	}
	if t := cmp.Or(c.Threshold, DefaultThreshold); !(t > 0 && t <= 1) {
		errs = append(errs, fmt.Errorf("--capacity-threshold %v: want more than 0, at most 1", c.Threshold))
	}
	if c.Log == nil {
		errs = append(errs, errors.New("no logger"))
	}
	return errors.Join(errs...)
}
