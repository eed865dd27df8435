package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
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

// Validate returns all problems at once.
func (c Config) Validate() error {
	var errs []error
	for _, d := range []struct {
		name     string
		value    time.Duration
		min, max time.Duration
	}{
		{"report interval", c.ReportInterval, 10 * time.Millisecond, time.Minute},
		{"prepare timeout", c.PrepareTimeout, time.Millisecond, time.Hour},
		{"window", c.Window, 10 * time.Millisecond, time.Hour},
		{"wait for consumers", cmp.Or(c.ConsumerWait, DefaultConsumerWait), time.Millisecond, time.Hour},
		{"evacuation", cmp.Or(c.EvacuateAfter, DefaultEvacuateAfter), 10 * time.Millisecond, 24 * time.Hour},
	} {
		if d.value < d.min || d.value > d.max {
			errs = append(errs, fmt.Errorf("%s %v: want %v to %v", d.name, d.value, d.min, d.max))
		}
	}
	if c.Window < c.ReportInterval {
		errs = append(errs, fmt.Errorf("window %v is shorter than the report interval %v", c.Window, c.ReportInterval))
	}
	if c.Rebalance != RebalanceOff {
		errs = append(errs, c.RebalanceRules.Validate())
	}
	if c.Fitting != "" && c.Fitting != tuner.ModeFast && c.Fitting != tuner.ModePaper {
		errs = append(errs, fmt.Errorf("fitting %q: want %q, %q, or none", c.Fitting, tuner.ModeFast, tuner.ModePaper))
	}
	if round := cmp.Or(c.FittingRound, tuner.DefaultRound); round < c.ReportInterval || round > time.Hour {
		errs = append(errs, fmt.Errorf("fitting rounds of %v: want the report interval of %v to 1h", round, c.ReportInterval))
	}
	if c.Log == nil {
		errs = append(errs, errors.New("no logger"))
	}
	return errors.Join(errs...)
}

// Controller is the single writer. Make it with New, and Run it.
type Controller struct {
	// Set once.
	reader
	unfinished []string // topics that have an owner for Run to start
	owners     *owners
	tuning     *tuning
	learning   *learning
	witness    *witness
	soon       chan struct{} // 1 deep: reconcile is not to wait
	metrics    metrics
}

// state is what the controller knows. What is not set once is guarded by its lock, which its
// methods require to be held, for reading at least by those that change nothing.
type state struct {
	sync.RWMutex
	cfg *Config // set once
	pipeline
	brokers
	followed

	topics   topics
	wanting  []string // those that a tick has something to do for, sorted, by the last round of judge
	lacking  []string // those with live.reserved
	profiles int      // being made, those of topics that are gone included
	tuner    *tuner.Tuner
	work     sync.WaitGroup // what goes on; begins with the lock held, while not closing
	closing  bool
	ending   chan struct{} // closed with closing
	empty    bool          // the catalog was at the start, and no topic was created since
	settled  time.Time     // of an empty one: until when it denies nothing; zero: no broker has joined
}

// pipeline is what events go through (commit.go).
type pipeline struct {
	wake   chan struct{}    // set once; 1 deep: something is staged
	cat    *catalog.Catalog // durable: what is shown
	next   *catalog.Catalog // decided: cat and what is staged
	staged []staged         // for the committer, oldest first
	halted error            // why nothing can be staged any more
}

// brokers are what is known of those beside the catalog, by id.
type brokers struct {
	sessions map[string]*Session
	requests uint64               // the last number given to a request
	left     map[string]bool      // that had a session here and have none
	away     map[string]time.Time // that are, since when seen
	drainers map[string]string    // who had them drained; of before this one led that is unknown
}

// followed is what a follower knows of its own knowledge (follower.go).
type followed struct {
	leader   func() string // set once, of a follower, who leads; nil: this one
	unread   bool          // before its first Reset
	cut      bool          // it cannot read the store any more
	informed chan struct{} // closed and replaced when either changes
}

// New checks the configuration.
func New(cfg Config, adaptor Adaptor) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("controller: %w", err)
	}
	cfg.EvacuateAfter = cmp.Or(cfg.EvacuateAfter, DefaultEvacuateAfter)
	cfg.ConsumerWait = cmp.Or(cfg.ConsumerWait, DefaultConsumerWait)
	cfg.FittingRound = cmp.Or(cfg.FittingRound, tuner.DefaultRound)
	if cfg.Traces == nil {
		cfg.Traces = noop.NewTracerProvider()
	}
	cat := cfg.Catalog
	if cat == nil {
		cat = catalog.New()
	}
	cfg.Catalog = nil
	empty := cat.Version() == 0 && cfg.Grace > 0
	if cat.Log() == 0 {
		cat.Name(rand.Uint64() | 1)
	}
	next, err := catalog.Load(cat.Dump())
	if err != nil {
		return nil, fmt.Errorf("controller: %w", err)
	}
	st := &state{
		cfg:      &cfg,
		pipeline: pipeline{wake: make(chan struct{}, 1), cat: cat, next: next},
		brokers: brokers{
			sessions: map[string]*Session{}, left: map[string]bool{}, away: map[string]time.Time{}, drainers: map[string]string{},
		},
		followed: followed{informed: make(chan struct{})},
		topics:   topics{},
		tuner: tuner.NewTuner(tuner.Config{
			Mode: cfg.Fitting, Round: cfg.FittingRound, Rebalance: cfg.Rebalance != RebalanceOff, Rules: cfg.RebalanceRules,
			Report: cfg.ReportInterval, Window: cfg.Window, Seed: cfg.Seed,
		}),
		ending: make(chan struct{}),
		empty:  empty,
	}
	for _, b := range cat.Brokers() {
		// A broker that was without a loaddistributor for long calls no sooner.
		st.away[b.ID] = time.Now().Add(max(0, returnWithin-cfg.EvacuateAfter))
	}
	ledger, metrics, soon := ledger{adaptor, cfg.PrepareTimeout}, newMetrics(cfg.Metrics), make(chan struct{}, 1)
	tracer := cfg.Traces.Tracer("github.com/srtm-io/srtm/loaddistributor/controller")
	owners := &owners{&cfg, st, ledger, &planner{mu: st, rng: rand.New(rand.NewPCG(cfg.Seed, 0))}, tracer}
	tuning := &tuning{&cfg, st, ledger, owners, metrics, tracer}
	c := &Controller{
		reader: reader{&cfg, st, ledger},
		owners: owners, tuning: tuning, learning: &learning{&cfg, st, owners, tuning}, witness: &witness{st, ledger, soon},
		soon: soon, metrics: metrics,
	}
	if err := c.recover(); err != nil {
		return nil, fmt.Errorf("controller: %w", err)
	}
	if cfg.Metrics != nil {
		if err := cfg.Metrics.Register(collector{st}); err != nil {
			return nil, fmt.Errorf("controller: %w", err)
		}
	}
	return c, nil
}

// Run recovers what an earlier controller left unfinished, and then compares
// and repairs until ctx ends. Then it refuses new work, rolls back the
// creations under way, waits for deletions, and ends the sessions and the
// watchers. It fails with ErrNotCommitted when the journal does, after the same
// steps; what it could not do then is for the next controller.
func (c *Controller) Run(ctx context.Context) error {
	if c.mu.leader != nil {
		<-ctx.Done()
		c.mu.Lock()
		close(c.mu.ending)
		c.mu.Unlock()
		return nil
	}
	stop, failed := make(chan struct{}), make(chan error, 1)
	commits := &committer{c.mu, c.cfg.Journal, c.cfg.Log, c.metrics.undumped}
	go func() { failed <- commits.run(stop) }()
	own, cancel := context.WithCancel(ctx)
	var others sync.WaitGroup
	c.resume()
	others.Go(func() { (&contracts{cfg: c.cfg, mu: c.mu, adaptor: c.adaptor, owners: c.owners}).run(own) })
	ticker := time.NewTicker(c.cfg.ReportInterval)
	defer ticker.Stop()
	committing := true
	var err error
	for running := true; running; {
		select {
		case <-ticker.C:
			c.tick(time.Now())
		case <-c.soon:
			c.reconcile(time.Now())
		case err = <-failed:
			running, committing = false, false
		case <-ctx.Done():
			running = false
		}
	}

	c.mu.Lock()
	c.mu.closing = true
	close(c.mu.ending)
	for _, l := range c.mu.topics {
		if l.creating != nil {
			l.creating.cancel(ErrClosing)
		}
	}
	c.mu.Unlock()
	cancel()
	others.Wait()
	c.mu.work.Wait() // with the sessions still up: roll-backs reach the brokers
	c.mu.Lock()
	for _, s := range c.mu.sessions {
		s.out.End(ErrClosing)
	}
	c.mu.Unlock()
	close(stop)
	if committing {
		err = errors.Join(err, <-failed)
	}
	return err
}

// tick is what is done as often as brokers report.
func (c *Controller) tick(now time.Time) {
	c.judge(now)
	c.assignWork(now)
	c.reconcile(now)
	c.remind(now)
	c.tuning.look(now)
	c.settle(now)
	c.learning.look(now)
	c.rebuild(now)
}

// recover stages what has to be said of an earlier controller's end before
// anything else happens. No caller waits any more for a topic that was being
// created: it is rolled back.
func (c *Controller) recover() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.next.Version() == 0 {
		return nil
	}
	if _, err := c.mu.stage(catalog.Restarted{}); err != nil {
		return err
	}
	for _, topic := range c.mu.next.Topics("", c.mu.next.Len()) {
		name := topic.Spec.Name()
		target := reconcile.Target{Gone: true}
		switch {
		case topic.State == catalog.Preparing:
			if _, err := c.mu.stage(catalog.TopicDeleting{Topic: name}); err != nil {
				return err
			}
		case topic.State == catalog.Deleting:
		case topic.Next != nil:
			target = reconcile.Target{Undo: true}
		default:
			continue
		}
		c.unfinished = append(c.unfinished, name)
		c.mu.topics.at(name).owner = &owner{wanted: []operation{{name: name, target: target, end: func(err error) {
			if err != nil {
				c.cfg.Log.Warn("left unfinished", obs.KeyTopic, name, obs.KeyError, err)
			}
		}}}}
	}
	return nil
}

// resume does what recover has found.
func (c *Controller) resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.unfinished {
		c.cfg.Log.Info("recovering what was left unfinished", obs.KeyTopic, name)
		own := c.mu.topics.at(name).owner
		c.mu.work.Go(func() { c.owners.own(name, own) })
	}
}
