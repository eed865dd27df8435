package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

// Config says what a fleet sends and to where.
type Config struct {
	// Topic that every message is published to.
	Topic string
	// Run marks the messages of this run.
	Run uint32
	// Sources are the publishers; events of the stream name them by index, and
	// their ids are the client_id of IDENTIFY.
	Sources []schedule.Source
	// Stream returns the schedule. It is called once for each worker, and each
	// call must return the same events. A fleet without one only connects.
	Stream func() schedule.Stream
	// Address is where all publishers connect. Empty: a publisher connects
	// when Assign has said where.
	Address string
	// Workers is the number of threads that send; 0 means 1, which is enough
	// for tens of thousands of messages a second.
	Workers int
	// Mpub sends a batch as one MPUB instead of PUBs back to back.
	Mpub bool
	// Heartbeat is the interval asked of the broker; 0 means 30 s.
	Heartbeat time.Duration
	// Drain bounds the wait for answers after the last message; 0 means 10 s.
	Drain time.Duration
	// MaxOutstanding bounds the unanswered commands of a publisher, and
	// MaxWaiting the messages it holds while it cannot send; what is beyond is
	// skipped and counted. 0 means 4096 for either.
	MaxOutstanding, MaxWaiting int
	// Capture keeps when each message was written (Fleet.Captured).
	Capture bool
	// Portable uses net.Conn and goroutines also where there is epoll.
	Portable bool
}

func (c *Config) setDefaults() {
	c.MaxOutstanding = cmp.Or(c.MaxOutstanding, 4096)
	c.MaxWaiting = cmp.Or(c.MaxWaiting, 4096)
	c.Heartbeat = cmp.Or(c.Heartbeat, 30*time.Second)
	c.Drain = cmp.Or(c.Drain, 10*time.Second)
	c.Workers = max(1, min(c.Workers, len(c.Sources)))
}

// Assignment says where a publisher connects from now on.
type Assignment struct {
	// Source is the publisher's index in Config.Sources.
	Source int32
	// Address is the broker's host:port. Empty: the publisher has no place for now.
	// It ends its connection after the last answer, and what becomes due until it
	// has one is skipped: a sensor that is not connected says nothing.
	Address string
	// Epoch orders assignments: an older one than the last is ignored.
	Epoch uint64
}

// Fleet is a set of publishers. Make it with New, then call Run; the other
// methods are for other goroutines and are safe at any time.
type Fleet struct {
	cfg     Config
	workers []*worker
	ready   chan struct{} // closed when every publisher has been connected once
	over    chan struct{} // closed when Run has returned
}

// New returns a fleet that does nothing yet.
func New(cfg Config) (*Fleet, error) {
	cfg.setDefaults()
	if len(cfg.Sources) == 0 {
		return nil, errors.New("a fleet without publishers")
	}
	if cfg.Workers < 1 || cfg.MaxOutstanding < 1 || cfg.MaxWaiting < 1 || cfg.Heartbeat < time.Second || cfg.Drain < 0 {
		return nil, fmt.Errorf("workers %d, outstanding %d, waiting %d: want at least 1; heartbeat %v: want at least 1s; drain %v: want at least 0",
			cfg.Workers, cfg.MaxOutstanding, cfg.MaxWaiting, cfg.Heartbeat, cfg.Drain)
	}
	f := &Fleet{cfg: cfg, ready: make(chan struct{}), over: make(chan struct{})}
	// The last worker whose publishers are all connected opens the gate.
	var unready atomic.Int64
	unready.Store(int64(cfg.Workers))
	open := func() {
		if unready.Add(-1) == 0 {
			close(f.ready)
		}
	}
	for i := range cfg.Workers {
		w, err := newWorker(&f.cfg, i, open)
		if err != nil {
			return nil, err
		}
		f.workers = append(f.workers, w)
	}
	return f, nil
}

// hello returns what a connection of a publisher starts with.
func hello(s schedule.Source, heartbeat time.Duration) ([]byte, error) {
	identify, err := json.Marshal(wire.IdentifyRequest{
		ClientID: s.ID, Hostname: "iotpub", UserAgent: "iotpub", HeartbeatInterval: heartbeat.Milliseconds(),
	})
	if err != nil {
		return nil, fmt.Errorf("publisher %q: %w", s.ID, err)
	}
	return wire.AppendIdentify(wire.AppendMagic(nil), identify), nil
}

// Run connects, sends from Start on, drains, and returns when every connection
// is closed. When ctx ends it stops at once, without draining, and returns the
// context's error. It is called once.
func (f *Fleet) Run(ctx context.Context) error {
	defer close(f.over)
	defer context.AfterFunc(ctx, f.abort)()
	var all sync.WaitGroup
	errs := make([]error, len(f.workers))
	for i, w := range f.workers {
		all.Go(func() {
			errs[i] = w.run()
			if errs[i] != nil {
				// The others' shares alone are not the schedule.
				f.abort()
			}
		})
	}
	all.Wait()
	return errors.Join(errors.Join(errs...), ctx.Err())
}

func (f *Fleet) abort() {
	for _, w := range f.workers {
		w.post(func() { w.aborted = true })
	}
}

// Ready waits until every publisher has been connected and identified once. It
// fails when ctx ends or Run returns first, and then says what it knows.
func (f *Fleet) Ready(ctx context.Context) error {
	select {
	case <-f.ready:
		return nil
	case <-f.over:
	case <-ctx.Done():
	}
	select {
	case <-f.ready: // both, and the good news counts
		return nil
	default:
	}
	if ctx.Err() == nil {
		return errors.New("the fleet stopped before all publishers were connected")
	}
	s := f.Stats()
	err := fmt.Errorf("%d of %d publishers connected: %w", s.Connected, len(f.cfg.Sources), ctx.Err())
	if s.LastError != "" {
		err = fmt.Errorf("%w; the last connection failed with: %s", err, s.LastError)
	}
	return err
}

// Start lets the schedule begin at the time `at`.
func (f *Fleet) Start(at mono.Time) {
	for _, w := range f.workers {
		w.post(func() {
			if !w.started {
				w.started, w.start = true, at
			}
		})
	}
}

// Stop ends the schedule now; Run returns when the fleet has drained.
func (f *Fleet) Stop() {
	for _, w := range f.workers {
		w.post(w.stop)
	}
}

// Assign says where publishers connect. A publisher that is connected elsewhere
// moves without a gap in its order: it connects to the new broker, stops
// sending to the old one, waits for the last answer, and goes on at the new one
// with what became due meanwhile. Unknown sources are ignored.
func (f *Fleet) Assign(assignments []Assignment) {
	assignments = slices.Clone(assignments)
	for i, w := range f.workers {
		w.post(func() {
			now := clock.Mono()
			for _, a := range assignments {
				if a.Source >= 0 && int(a.Source) < len(f.cfg.Sources) && int(a.Source)%len(f.workers) == i && !w.aborted {
					w.assign(a, now)
				}
			}
		})
	}
}

// Stats returns what was counted up to now, or in all once Run has returned.
// It waits for Run to be called.
func (f *Fleet) Stats() Stats {
	total := newStats()
	for _, w := range f.workers {
		s := w.snapshot()
		total.add(&s)
	}
	return total
}

// Accepted returns the set of messages that were answered with OK.
//
// Requires: Run has returned.
func (f *Fleet) Accepted() *verify.Set {
	all := verify.NewSet(len(f.cfg.Sources))
	for _, w := range f.workers {
		all.Merge(w.accepted)
	}
	return all
}

// Captured returns when messages were written, in no order; empty without
// Config.Capture.
//
// Requires: Run has returned.
func (f *Fleet) Captured() []mono.Time {
	var all []mono.Time
	for _, w := range f.workers {
		all = append(all, w.captured...)
	}
	return all
}

// bodySize is the size of a message that the schedule wants to have size bytes.
func bodySize(size int32) int { return max(int(size), payload.Size) }
