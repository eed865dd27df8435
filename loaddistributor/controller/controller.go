package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Adaptor is the GrantService, embedded (tbadaptor/loop.Server is one) or
// Remote. Its errors are gRPC statuses.
type Adaptor interface {
	SetContract(context.Context, *srtmv1.SetContractRequest) (*srtmv1.SetContractResponse, error)
	RemoveContract(context.Context, *srtmv1.RemoveContractRequest) (*srtmv1.RemoveContractResponse, error)
	ListShares(context.Context, *srtmv1.ListSharesRequest) (*srtmv1.ListSharesResponse, error)
}

// Remote is an adaptor in another process. While it is away, calls wait for it
// until their context ends.
type Remote struct{ Client srtmv1.GrantServiceClient }

// SetContract implements Adaptor.
func (r Remote) SetContract(ctx context.Context, in *srtmv1.SetContractRequest) (*srtmv1.SetContractResponse, error) {
	return r.Client.SetContract(ctx, in, grpc.WaitForReady(true))
}

// RemoveContract implements Adaptor.
func (r Remote) RemoveContract(ctx context.Context, in *srtmv1.RemoveContractRequest) (*srtmv1.RemoveContractResponse, error) {
	return r.Client.RemoveContract(ctx, in, grpc.WaitForReady(true))
}

// ListShares implements Adaptor.
func (r Remote) ListShares(ctx context.Context, in *srtmv1.ListSharesRequest) (*srtmv1.ListSharesResponse, error) {
	return r.Client.ListShares(ctx, in, grpc.WaitForReady(true))
}

// Defaults of Config.
const (
	DefaultReportInterval = time.Second
	DefaultPrepareTimeout = 5 * time.Second
	DefaultWindow         = 10 * time.Second
)

// Config is fixed at start.
type Config struct {
	// How often brokers report, and how often the controller compares.
	ReportInterval time.Duration
	// How long a step of a creation or deletion may take: all brokers to
	// prepare, the adaptor to settle.
	PrepareTimeout time.Duration
	// Length of the sliding window of figures.
	Window time.Duration
	// Where brokers get their grants, host:port; empty: where they reach us.
	GrantAddress string
	// Seed of the placement policies that draw publishers at random.
	Seed    uint64
	Log     *slog.Logger
	Metrics prometheus.Registerer // nil: not exported
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
	} {
		if d.value < d.min || d.value > d.max {
			errs = append(errs, fmt.Errorf("%s %v: want %v to %v", d.name, d.value, d.min, d.max))
		}
	}
	if c.Window < c.ReportInterval {
		errs = append(errs, fmt.Errorf("window %v is shorter than the report interval %v", c.Window, c.ReportInterval))
	}
	if c.Log == nil {
		errs = append(errs, errors.New("no logger"))
	}
	return errors.Join(errs...)
}

// Controller is the single writer. Make it with New, and Run it.
type Controller struct {
	// Set once.
	cfg     Config
	adaptor Adaptor
	work    sync.WaitGroup // creations and deletions; Add under mu, while not closing

	// placing is held from the snapshot to the commit of a plan, so that
	// plans do not overtake each other; brokers may still come and go, which
	// the commit notices.
	placing struct {
		sync.Mutex
		rng *rand.Rand
	}

	mu struct {
		sync.RWMutex
		cat      *catalog.Catalog
		sessions map[string]*Session              // by broker
		creating map[string]*creation             // by topic
		names    map[string]chan struct{}         // held by a procedure; closed when released
		watchers map[string]map[*watcher]struct{} // by topic
		requests uint64                           // the last number given to a request
		closing  bool
		ending   chan struct{} // closed with closing
	}
}

// New checks the configuration.
func New(cfg Config, adaptor Adaptor) (*Controller, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("controller: %w", err)
	}
	c := &Controller{cfg: cfg, adaptor: adaptor}
	c.placing.rng = rand.New(rand.NewPCG(cfg.Seed, 0))
	c.mu.cat = catalog.New()
	c.mu.sessions = map[string]*Session{}
	c.mu.creating = map[string]*creation{}
	c.mu.names = map[string]chan struct{}{}
	c.mu.watchers = map[string]map[*watcher]struct{}{}
	c.mu.ending = make(chan struct{})
	if cfg.Metrics != nil {
		if err := cfg.Metrics.Register(collector{c}); err != nil {
			return nil, fmt.Errorf("controller: %w", err)
		}
	}
	return c, nil
}

// Run compares and repairs until ctx ends. Then it refuses new work, rolls
// back the creations under way, waits for deletions, and ends the sessions and
// the watchers.
func (c *Controller) Run(ctx context.Context) error {
	own, cancel := context.WithCancel(ctx)
	var contracts sync.WaitGroup
	contracts.Go(func() { c.keepContracts(own) })
	ticker := time.NewTicker(c.cfg.ReportInterval)
	defer ticker.Stop()
	for running := true; running; {
		select {
		case <-ticker.C:
			c.judge(time.Now())
			c.assignWork(time.Now())
		case <-ctx.Done():
			running = false
		}
	}

	c.mu.Lock()
	c.mu.closing = true
	close(c.mu.ending)
	for _, cr := range c.mu.creating {
		cr.cancel(ErrClosing)
	}
	c.mu.Unlock()
	cancel()
	contracts.Wait()
	c.work.Wait() // with the sessions still up: roll-backs reach the brokers
	c.mu.Lock()
	for _, s := range c.mu.sessions {
		s.out.End(ErrClosing)
	}
	c.mu.Unlock()
	return nil
}

// commitLocked applies an event and notes what follows. What is to be logged
// it returns, for the caller to log when it has let go of mu. Requires: mu held.
func (c *Controller) commitLocked(e catalog.Event) (changes []catalog.StateChanged, err error) {
	effects, err := c.mu.cat.Apply(e)
	if err != nil {
		return nil, err
	}
	for _, effect := range effects {
		switch effect := effect.(type) {
		case catalog.PlacementChanged:
			c.wakeLocked(effect.Topic)
		case catalog.StateChanged:
			c.wakeLocked(effect.Topic)
			changes = append(changes, effect)
		}
	}
	return changes, nil
}

// commit applies one event.
func (c *Controller) commit(e catalog.Event) error {
	c.mu.Lock()
	changes, err := c.commitLocked(e)
	c.mu.Unlock()
	c.logChanges(changes)
	return err
}

func (c *Controller) logChanges(changes []catalog.StateChanged) {
	for _, s := range changes {
		level := slog.LevelInfo
		if s.To == catalog.Degraded {
			level = slog.LevelWarn
		}
		c.cfg.Log.Log(context.Background(), level, "topic", obs.KeyTopic, s.Topic,
			obs.KeyState, s.To.String(), "from", s.From.String(), obs.KeyReason, s.Reason)
	}
}

// hold makes the caller the only procedure on the named topic until it calls
// release, and waits for the one before.
func (c *Controller) hold(ctx context.Context, name string) (release func(), err error) {
	for {
		c.mu.Lock()
		held := c.mu.names[name]
		if held == nil {
			release = c.holdLocked(name)
			c.mu.Unlock()
			return release, nil
		}
		c.mu.Unlock()
		select {
		case <-held:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// holdLocked requires that nobody holds the name, and mu.
func (c *Controller) holdLocked(name string) (release func()) {
	held := make(chan struct{})
	c.mu.names[name] = held
	return func() {
		c.mu.Lock()
		delete(c.mu.names, name)
		c.mu.Unlock()
		close(held)
	}
}
