package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace/noop"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// Controller is the single writer. Make it with New, and Run it.
type Controller struct {
	// Set once.
	reader
	unfinished []string // topics whose owner Run must start
	owners     *owners
	tuning     *tuning
	learning   *learning
	mover      *mover
	witness    *witness
	soon       chan struct{} // 1 deep: wakes mover before the next tick
	metrics    metrics
	end        context.CancelCauseFunc // ends the wait for answers of the adaptor and of brokers
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
	st := &state{
		cfg:      &cfg,
		pipeline: pipeline{wake: make(chan struct{}, 1), cat: cat, next: next},
		brokers: brokers{
			sessions: map[string]*Session{}, holders: map[string]*holder{}, left: map[string]bool{}, away: map[string]time.Time{},
			drainers: map[string]string{}, removing: map[string]bool{},
		},
		followed: followed{informed: make(chan struct{})},
		topics:   topics{},
		tuner: tuner.NewTuner(tuner.Config{
			Mode: cfg.Fitting, Round: cfg.FittingRound, Rebalance: cfg.Rebalance != RebalanceOff, Rules: cfg.RebalanceRules,
			Report: cfg.ReportInterval, Window: cfg.Window, Seed: cfg.Seed,
		}),
		ending: make(chan struct{}), late: life.Done(),
		empty: empty,
	}
	for _, b := range cat.Brokers() {
		st.holders[b.ID] = holds(b, clock.Mono())
		// A broker that was long without a loaddistributor reconnects only after
		// returnWithin.
		st.away[b.ID] = time.Now().Add(max(0, returnWithin-cfg.EvacuateAfter))
	}
	ledger, metrics, soon := ledger{adaptor, cfg.PrepareTimeout, life}, newMetrics(cfg.Metrics), make(chan struct{}, 1)
	tracer := cfg.Traces.Tracer("github.com/srtm-io/srtm/loaddistributor/controller")
	read := reader{&cfg, st, ledger}
	owners := &owners{&cfg, st, ledger, &planner{mu: st, rng: rand.New(rand.NewPCG(cfg.Seed, 0))}, &read, tracer}
	tuning := &tuning{&cfg, st, ledger, owners, metrics, tracer}
	c := &Controller{
		reader: read,
		owners: owners, tuning: tuning, mover: &mover{st, owners}, learning: &learning{&cfg, st, owners, tuning}, witness: &witness{st, ledger, soon},
		soon: soon, metrics: metrics, end: end,
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

// Run finishes or rolls back the work of an earlier controller. Then it compares and
// repairs until ctx ends. At the end Run refuses new work, rolls back running creations,
// waits for deletions, and ends the sessions and the watchers. If the journal fails, Run
// takes the same steps and returns ErrNotCommitted; the next controller completes the
// rest.
func (c *Controller) Run(ctx context.Context) error {
	if c.mu.leader != nil {
		<-ctx.Done()
		c.mu.Lock()
		close(c.mu.ending)
		c.mu.Unlock()
		return nil
	}
	stop, failed := make(chan struct{}), make(chan error, 1)
	commits := &committer{c.mu, c.cfg.Journal, c.cfg.Log, c.metrics.undumped, false}
	appending, abandon := context.WithCancel(context.Background())
	defer abandon()
	go func() { failed <- commits.run(appending, stop) }()
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
			c.mover.look(time.Now())
		case err = <-failed:
			running, committing = false, false
		case <-ctx.Done():
			running = false
		}
	}

	patience := time.AfterFunc(stopPatience, abandon)
	defer patience.Stop()
	c.mu.Lock()
	c.mu.closing = true
	close(c.mu.ending)
	for _, l := range c.mu.topics {
		if l.creating != nil {
			l.creating.cancel(ErrClosing)
		}
	}
	c.mu.Unlock()
	giveUp := time.AfterFunc(changePatience, func() { c.end(ErrClosing) })
	defer giveUp.Stop()
	cancel()
	others.Wait()
	c.mu.work.Wait() // sessions are still open: roll-backs reach the brokers
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

// tick runs once per report interval.
func (c *Controller) tick(now time.Time) {
	c.judge(now)
	c.assignWork(now)
	c.mover.look(now)
	c.owners.remind(now)
	c.tuning.look(now)
	c.mover.settle(now)
	c.learning.look(now)
	c.rebuild(now)
}

// recover stages the events that follow from an earlier controller's end, before any
// other event. A topic that was being created has no waiting caller, so recover rolls the
// creation back.
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

// resume starts the owners of the topics found by recover.
func (c *Controller) resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.unfinished {
		c.cfg.Log.Info("recovering what was left unfinished", obs.KeyTopic, name)
		own := c.mu.topics.at(name).owner
		c.mu.work.Go(func() { c.owners.own(name, own) })
	}
}
