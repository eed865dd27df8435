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
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Defaults of Config.
const (
	DefaultReportInterval = time.Second
	DefaultPrepareTimeout = 5 * time.Second
	DefaultWindow         = 10 * time.Second
	// DefaultConsumerWait is how long a move waits for consumers. A library that asks
	// where a topic is when a connection ends needs milliseconds, and the report that
	// tells of it up to a second; but go-nsq may give a connection that is new to it no
	// RDY for 5 s, until its others have less. One that asks at an interval only, which is
	// a minute with most, is not waited for to the end.
	DefaultConsumerWait = 8 * time.Second
)

// Config is fixed at start.
type Config struct {
	// How often brokers report, and how often the controller compares.
	ReportInterval time.Duration
	// How long a step of a creation or deletion may take: all brokers to
	// prepare, the adaptor to settle.
	PrepareTimeout time.Duration
	// Length of the sliding window of the reports.
	Window time.Duration
	// How long a broker may be away before its publishers are placed elsewhere;
	// 0: DefaultEvacuateAfter.
	EvacuateAfter time.Duration
	// How long a broker may be away before another takes over what it has of replicated
	// topics; < 0: for ever.
	TakeOverAfter time.Duration
	// How long a move waits for consumers to come to the brokers that are new to the
	// topic; 0: DefaultConsumerWait.
	ConsumerWait time.Duration
	// How long a broker's id stays with a process that is silent and that may live; 0:
	// DefaultIDLease.
	IDLease time.Duration
	// Probe finds out whether a broker's process has ended; nil: that is never known.
	Probe Probe
	// What becomes of moves that relieve overloaded brokers, and when they are
	// due; the rules are checked unless it is off.
	Rebalance      Rebalance
	RebalanceRules tuner.RebalanceConfig
	// For how long after the first broker has joined a catalog that was empty at the
	// start denies no topic: others may hold it. 0: it does so at once.
	Grace time.Duration
	// Where brokers get their grants, host:port; empty: where they reach us.
	GrantAddress string
	// ForwardKey is what brokers show each other when one forwards to another; empty: brokers do
	// not forward.
	ForwardKey []byte
	// Fitting is how new topics are fitted: tuner.ModeFast, tuner.ModePaper, or
	// empty for not at all. FittingRound is how long a round of the paper's lasts;
	// 0: tuner.DefaultRound.
	Fitting      string
	FittingRound time.Duration
	// TenantRates bound the sum of a tenant's contracts; that of "*" is for tenants
	// that are not named.
	TenantRates map[string]tokenbucket.Rate
	// Seed of the placement policies that draw publishers at random.
	Seed uint64
	// Journal keeps what is committed, and Catalog is what it has from before;
	// both nil: nothing is kept beyond the process. The catalog is the
	// controller's from New on.
	Journal Journal
	Catalog *catalog.Catalog
	// Traces get a span of each operation on a topic and of each fit; nil: there are none.
	Traces trace.TracerProvider
	// Others follow this one, and who watches there is not known here: all
	// publishers are taken to be watched.
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
	if c.Log == nil {
		errs = append(errs, errors.New("no logger"))
	}
	return errors.Join(errs...)
}
