// Package controller is the single writer of the control plane. It reads a snapshot of
// the catalog, gets a plan from loaddistributor/placement, commits the event, and then
// informs brokers, the adaptor and watchers. It uses gRPC messages as data, without gRPC
// calls: loaddistributor/rpc and loaddistributor/lookup serve the requests, and an
// Adaptor makes the calls to the adaptor.
//
// A Controller owns the data and the lock, makes the parts (Controller.wire), and
// receives requests and messages of brokers. The data is:
//
//	pipeline   the catalog, and the staged events (journal.go)
//	brokers    sessions of brokers, and who owns a broker's id (brokers.go)
//	topics     data about topics beside the catalog (topics.go)
//	knowledge  how complete the catalog of this process is (follower.go)
//
// One lock guards the data, because most decisions read all of it. A part holds the
// pieces of data that it uses, and no part refers to the Controller:
//
//	View       serves reads, on a follower too (view.go)
//	committer  appends staged events to the journal; announcer shows them (journal.go)
//	planner    makes plans, one at a time (planner.go)
//	owners     change topics. One goroutine per topic runs one operation after the
//	           other (owners.go). An operation is a change that drives the topic's
//	           state machine, loaddistributor/reconcile.
//	requests   sends brokers the work that they lack (requests.go)
//	channels   keeps the brokers' channels up to date (channels.go)
//	mover      moves topics away from brokers that drain or are gone (evacuation.go)
//	contracts  compares the adaptor's contracts with the catalog (contracts.go)
//	judge      keeps the verdicts about topics (judge.go)
//	tuning     carries out the effects of loaddistributor/tuner (tuning.go)
//	learning   places open topics by their learned publishers (learning.go)
//	fleet      reports how many brokers are lacking (fleet.go)
//	copies     rebuilds lost topics from the brokers' copies (recovery.go)
//	witness    finds out whether a broker's process has ended (identity.go)
//
// Once per report interval the Controller runs the parts (Controller.tick).
//
// Calls go one way: requests of clients, mover, tuning, learning and contracts use owners
// to change topics; owners use the planner; the planner commits. Lock order:
// planner.turn before the controller's lock.
package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/shortage"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// Controller is the single writer. Make it with New, and Run it.
type Controller struct {
	// Set once.
	cfg     *Config
	view    *View
	adaptor grants
	end     context.CancelCauseFunc // ends the wait for answers of the adaptor and of brokers
	wake    chan struct{}           // 1 deep: wakes mover before the next tick
	metrics metrics

	// The parts. Each has only what it uses.
	announcer *announcer
	contracts *contracts
	copies    *copies
	fleet     *fleet
	judge     *judge
	learning  *learning
	mover     *mover
	owners    *owners
	requests  *requests
	tenants   *tenants
	tuning    *tuning
	witness   *witness

	unfinished []string // owned by recover and Run: topics whose owner Run must start

	// The data that the parts share. mu guards the data.
	mu        sync.RWMutex
	brokers   *brokers
	cat       *pipeline
	channels  *channels
	knowledge *knowledge
	life      *lifetime
	topics    *topics
	tuner     *tuner.Tuner
	profiles  int // profiles in progress, including profiles of deleted topics
}

// View returns the controller's reads.
func (c *Controller) View() *View { return c.view }

// lifetime ends the controller's goroutines. The controller's lock guards closing.
type lifetime struct {
	work        sync.WaitGroup // all goroutines; Add requires the lock and not closing
	closing     bool
	ending      chan struct{}   // closed with closing; a follower replaces it
	stopWaiting <-chan struct{} // set once; closed when changes stop waiting for answers
}

// New validates the configuration and returns a controller. The controller is inactive
// until Run.
func New(cfg Config, adaptor Adaptor) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("controller: %w", err)
	}
	cfg.EvacuateAfter = cmp.Or(cfg.EvacuateAfter, DefaultEvacuateAfter)
	cfg.IDLease = cmp.Or(cfg.IDLease, DefaultIDLease)
	cfg.ConsumerWait = cmp.Or(cfg.ConsumerWait, DefaultConsumerWait)
	cfg.FittingRound = cmp.Or(cfg.FittingRound, tuner.DefaultRound)
	cfg.Threshold = cmp.Or(cfg.Threshold, DefaultThreshold)
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
	life, end := context.WithCancelCause(context.Background())
	c := &Controller{
		cfg: &cfg, end: end, wake: make(chan struct{}, 1), metrics: newMetrics(cfg.Metrics),
		adaptor: grants{adaptor, cfg.PrepareTimeout, life},
		brokers: &brokers{
			cfg:      &cfg,
			sessions: map[string]*Session{}, holders: map[string]*holder{}, sessionEnded: map[string]bool{}, disconnectedSince: map[string]time.Time{},
			drainers: map[string]string{}, removing: map[string]bool{},
		},
		knowledge: &knowledge{informed: make(chan struct{}), empty: empty},
		life:      &lifetime{ending: make(chan struct{}), stopWaiting: life.Done()},
		topics:    &topics{byName: map[string]*liveTopic{}},
		tuner: tuner.NewTuner(tuner.Config{
			Mode: cfg.Fitting, Round: cfg.FittingRound, Rebalance: cfg.Rebalance != RebalanceOff, Rules: cfg.RebalanceRules,
			Report: cfg.ReportInterval, Window: cfg.Window, Seed: cfg.Seed,
		}),
	}
	c.cat = &pipeline{mu: &c.mu, wake: make(chan struct{}, 1), committed: cat, next: next}
	for _, b := range cat.Brokers() {
		c.brokers.holders[b.ID] = holderOf(b, clock.Mono())
		// A broker that was long without a loaddistributor reconnects only after
		// returnWithin.
		c.brokers.disconnectedSince[b.ID] = time.Now().Add(max(0, returnWithin-cfg.EvacuateAfter))
	}
	c.wire(cfg.Traces.Tracer("github.com/srtm-io/srtm/loaddistributor/controller"))
	if err := c.recover(); err != nil {
		return nil, fmt.Errorf("controller: %w", err)
	}
	if cfg.Metrics != nil {
		if err := cfg.Metrics.Register(collector{&cfg, &c.mu, c.cat, c.brokers, c.topics, c.tuner, c.judge, c.fleet}); err != nil {
			return nil, fmt.Errorf("controller: %w", err)
		}
	}
	return c, nil
}

// wire makes the parts. Each part gets only what it uses.
func (c *Controller) wire(tracer trace.Tracer) {
	cfg, mu, adaptor := c.cfg, &c.mu, c.adaptor
	c.tenants = &tenants{cfg.TenantRates, mu, c.cat}
	c.view = &View{cfg, mu, c.cat, c.brokers, c.topics, c.knowledge, c.tuner, adaptor, c.tenants, c.life}
	c.channels = &channels{cat: c.cat, brokers: c.brokers, life: c.life}
	c.copies = &copies{cfg.Log, mu, c.cat, c.brokers, c.topics, c.knowledge}
	c.requests = &requests{cfg, c.cat, c.brokers, c.topics, c.channels, c.copies}
	c.announcer = &announcer{c.cat, c.brokers, c.topics, c.channels, c.copies, c.requests, c.knowledge}
	c.judge = &judge{cfg, mu, c.cat, c.brokers, c.topics}
	terms := &terms{c.cat, c.brokers, c.topics}
	c.fleet = &fleet{cfg: cfg, mu: mu, cat: c.cat, book: shortage.New(cfg.Threshold), missed: map[string]bool{}}
	planner := &planner{mu: mu, cat: c.cat, brokers: c.brokers, tenants: c.tenants, fleet: c.fleet, rng: rand.New(rand.NewPCG(cfg.Seed, 0))}
	c.owners = &owners{mu, c.topics, c.knowledge, c.life, changes{
		cfg, mu, c.cat, c.brokers, c.topics, c.requests, terms, c.life, adaptor, planner, c.view.Lowering, tracer,
	}, tracer}
	c.mover = &mover{cfg, mu, c.cat, c.brokers, c.topics, c.tuner, terms, c.owners}
	c.tuning = &tuning{cfg, mu, c.cat, c.brokers, c.topics, c.tuner, c.life, adaptor, c.owners, c.metrics, tracer, c.fleet}
	c.learning = &learning{cfg, mu, c.cat, c.brokers, c.topics, c.tenants, c.tuner, c.owners, c.tuning}
	c.witness = &witness{cfg, mu, c.cat, c.brokers, c.life, adaptor, c.wake}
	c.contracts = &contracts{cfg: cfg, mu: mu, cat: c.cat, brokers: c.brokers, topics: c.topics, life: c.life, adaptor: adaptor, owners: c.owners}
}

// Run finishes or rolls back the work of an earlier controller. Then it compares and
// repairs until ctx ends. At the end Run refuses new work, rolls back running creations,
// waits for deletions, and ends the sessions and the watchers. If the journal fails, Run
// takes the same steps and returns ErrNotCommitted; the next controller completes the
// rest.
func (c *Controller) Run(ctx context.Context) error {
	if c.knowledge.leader != nil {
		<-ctx.Done()
		c.mu.Lock()
		close(c.life.ending)
		c.mu.Unlock()
		return nil
	}
	stop, failed := make(chan struct{}), make(chan error, 1)
	commits := &committer{&c.mu, c.cat, c.announcer, c.cfg.Journal, c.cfg.Log, c.metrics.undumped, false}
	appending, abandon := context.WithCancel(context.Background())
	defer abandon()
	go func() { failed <- commits.run(appending, stop) }()
	runCtx, cancel := context.WithCancel(ctx)
	var background sync.WaitGroup
	c.resume()
	background.Go(func() { c.contracts.run(runCtx) })
	ticker := time.NewTicker(c.cfg.ReportInterval)
	defer ticker.Stop()
	committing := true
	var err error
	for running := true; running; {
		select {
		case <-ticker.C:
			c.tick(time.Now())
		case <-c.wake:
			c.mover.run(time.Now())
		case err = <-failed:
			running, committing = false, false
			c.end(err) // another controller may lead, and a contract of this one must not follow that one's
		case <-ctx.Done():
			running = false
		}
	}

	patience := time.AfterFunc(stopPatience, abandon)
	defer patience.Stop()
	c.mu.Lock()
	c.life.closing = true
	close(c.life.ending)
	for _, l := range c.topics.byName {
		if l.creating != nil {
			l.creating.cancel(ErrClosing)
		}
	}
	c.mu.Unlock()
	giveUp := time.AfterFunc(changePatience, func() { c.end(ErrClosing) })
	defer giveUp.Stop()
	cancel()
	background.Wait()
	c.life.work.Wait() // sessions are still open: roll-backs reach the brokers
	c.mu.Lock()
	for _, s := range c.brokers.sessions {
		s.out.End(ErrClosing)
	}
	c.mu.Unlock()
	close(stop)
	if committing {
		err = errors.Join(err, <-failed)
	}
	return err
}

// tick runs once per report interval.
func (c *Controller) tick(now time.Time) {
	c.judge.run(now)
	c.assignWork(now)
	c.mover.run(now)
	c.mover.remind(now)
	c.mover.nudgeLate(now)
	c.tuning.run(now)
	c.mover.settle(now)
	c.learning.run(now)
	c.copies.rebuild(now)
	c.fleet.announce(now)
}

// recover stages the events that follow from an earlier controller's end, before any
// other event. A topic that was being created has no waiting caller, so recover rolls the
// creation back.
func (c *Controller) recover() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cat.next.Version() == 0 {
		return nil
	}
	if _, err := c.cat.stage(catalog.Restarted{}); err != nil {
		return err
	}
	for _, topic := range c.cat.next.Topics("", c.cat.next.Len()) {
		name := topic.Spec.Name()
		target := reconcile.Target{Gone: true}
		switch {
		case topic.State == catalog.Preparing:
			if _, err := c.cat.stage(catalog.TopicDeleting{Topic: name}); err != nil {
				return err
			}
		case topic.State == catalog.Deleting:
		case topic.Next != nil:
			target = reconcile.Target{Undo: true}
		default:
			continue
		}
		c.unfinished = append(c.unfinished, name)
		c.topics.entry(name).owner = &owner{queued: []operation{{name: name, target: target, end: func(err error) {
			if err != nil {
				c.cfg.Log.Warn("a change of the topic was not completed; the next leader completes it", obs.KeyTopic, name, obs.KeyError, err)
			}
		}}}}
	}
	return nil
}

// resume starts the owners of the topics found by recover.
func (c *Controller) resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.unfinished {
		c.cfg.Log.Info("completing a change that the previous leader began", obs.KeyTopic, name)
		topicOwner := c.topics.entry(name).owner
		c.life.work.Go(func() { c.owners.run(name, topicOwner) })
	}
}
