// Package fleet runs thousands of emulated publishers on a few threads. A fleet sends a
// schedule's events at the scheduled times, over one connection per publisher, and records
// every reply. The load is an open loop: an unanswered event never delays a later event,
// and latency counts from the intended send time.
//
// A worker (worker.go) owns a share of the publishers with all their state, and runs on its
// own thread. The worker waits in a poller both for the next send time and for replies, so
// a message costs no goroutine switch. The poller is rawfd.Poller, which is exact; Go's
// timers round up to a millisecond. On systems other than Linux a fleet returns an error.
//
// The package does not decide where a publisher connects. The caller passes the addresses
// to Assign (tools/iotpub/emulate gets them from the loaddistributor).
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
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

// Config describes a fleet.
type Config struct {
	// Topic is the topic of every message.
	Topic string
	// MQTT makes the publishers speak MQTT 5.0 instead of NSQ, with quality of service 1. Brokers
	// may redirect a publisher. Name is the MQTT topic name, in which {id} is the publisher's ID;
	// empty: Topic.
	MQTT bool
	Name string
	// Run marks the messages of this run.
	Run uint32
	// Sources are the publishers. Events of the stream refer to a publisher by its index. A
	// publisher's ID is the client_id in IDENTIFY, or the client id in CONNECT.
	Sources []schedule.Source
	// Stream returns the schedule. Each worker calls Stream once, and each call must return
	// the same events. A fleet without Stream only connects.
	Stream func() schedule.Stream
	// Address is the broker of all publishers. If Address is empty, a publisher waits for
	// Assign.
	Address string
	// Workers is the number of sending threads; 0 means 1. One worker sends tens of
	// thousands of messages a second.
	Workers int
	// Mpub sends a batch as one MPUB instead of PUBs back to back.
	Mpub bool
	// Heartbeat is the requested heartbeat interval, or the keep alive of MQTT; 0 means 30 s.
	Heartbeat time.Duration
	// Drain bounds the wait for replies after the last message; 0 means 10 s.
	Drain time.Duration
	// MaxOutstanding bounds the unanswered commands of a publisher. MaxWaiting bounds the
	// messages that a publisher holds while it cannot send. Excess messages are skipped and
	// counted. 0 means 4096 for both.
	MaxOutstanding, MaxWaiting int
	// Capture records the write time of each message (Fleet.Captured).
	Capture bool
}

func (c *Config) setDefaults() {
	c.MaxOutstanding = cmp.Or(c.MaxOutstanding, 4096)
	c.MaxWaiting = cmp.Or(c.MaxWaiting, 4096)
	c.Heartbeat = cmp.Or(c.Heartbeat, 30*time.Second)
	c.Drain = cmp.Or(c.Drain, 10*time.Second)
	c.Workers = max(1, min(c.Workers, len(c.Sources)))
}

// Assignment is the new broker of a publisher.
type Assignment struct {
	// Source is the publisher's index in Config.Sources.
	Source int32
	// Address is the broker's host:port. If Address is empty, the publisher has no place.
	// It closes its connection after the last reply, and skips messages until the next
	// assignment, like a sensor without a connection.
	Address string
	// Epoch orders assignments. An assignment older than the last is ignored.
	Epoch uint64
}

// Fleet is a set of publishers. Create a Fleet with New, then call Run. The other methods
// are safe for concurrent use at any time.
type Fleet struct {
	cfg     Config
	workers []*worker
	ready   chan struct{} // closed when every publisher has connected once
	ended   chan struct{} // closed when Run has returned
}

// New returns a fleet that has not started.
func New(cfg Config) (*Fleet, error) {
	cfg.setDefaults()
	if len(cfg.Sources) == 0 {
		return nil, errors.New("a fleet without publishers")
	}
	if cfg.Workers < 1 || cfg.MaxOutstanding < 1 || cfg.MaxWaiting < 1 || cfg.Heartbeat < time.Second || cfg.Drain < 0 {
		return nil, fmt.Errorf("workers %d, outstanding %d, waiting %d: want at least 1; heartbeat %v: want at least 1s; drain %v: want at least 0",
			cfg.Workers, cfg.MaxOutstanding, cfg.MaxWaiting, cfg.Heartbeat, cfg.Drain)
	}
	f := &Fleet{cfg: cfg, ready: make(chan struct{}), ended: make(chan struct{})}
	// The last worker whose publishers are all connected closes ready.
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

// hello returns the first bytes of a publisher's connection.
func hello(s schedule.Source, heartbeat time.Duration) ([]byte, error) {
	identify, err := json.Marshal(wire.IdentifyRequest{
		ClientID: s.ID, Hostname: "iotpub", UserAgent: "iotpub", HeartbeatInterval: heartbeat.Milliseconds(),
	})
	if err != nil {
		return nil, fmt.Errorf("publisher %q: %w", s.ID, err)
	}
	return wire.AppendIdentify(wire.AppendMagic(nil), identify), nil
}

// Run connects, sends from Start on, drains, and returns when every connection is closed.
// If ctx ends, Run stops without draining and returns the context's error. Run is called
// once.
func (f *Fleet) Run(ctx context.Context) error {
	defer close(f.ended)
	defer context.AfterFunc(ctx, f.abort)()
	var all sync.WaitGroup
	errs := make([]error, len(f.workers))
	for i, w := range f.workers {
		all.Go(func() {
			errs[i] = w.run()
			if errs[i] != nil {
				// Without one worker's share the schedule is incomplete.
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

// Ready waits until every publisher has connected and identified once. Ready fails if ctx
// ends or Run returns first.
func (f *Fleet) Ready(ctx context.Context) error {
	select {
	case <-f.ready:
		return nil
	case <-f.ended:
	case <-ctx.Done():
	}
	select {
	case <-f.ready: // both channels were ready; success counts
		return nil
	default:
	}
	if ctx.Err() == nil {
		return errors.New("the fleet stopped before all publishers were connected")
	}
	s := f.Stats()
	err := fmt.Errorf("%d of %s connected: %w", s.Connected, plural.Count(len(f.cfg.Sources), "publisher"), ctx.Err())
	if s.LastError != "" {
		err = fmt.Errorf("%w; the last connection failed with: %s", err, s.LastError)
	}
	return err
}

// Start starts the schedule at the given time.
func (f *Fleet) Start(at mono.Time) {
	for _, w := range f.workers {
		w.post(func() {
			if !w.started {
				w.started, w.start = true, at
			}
		})
	}
}

// Stop ends the schedule. Run returns after the fleet has drained.
func (f *Fleet) Stop() {
	for _, w := range f.workers {
		w.post(w.stop)
	}
}

// Assign assigns publishers to brokers. A connected publisher moves without a gap in its
// order: it connects to the new broker, stops sending to the old broker, waits for the last
// reply, and continues at the new broker with the waiting messages. Unknown sources are
// ignored.
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

// Stats returns the current stats, or the final stats after Run has returned. Stats blocks
// until Run is called.
func (f *Fleet) Stats() Stats {
	total := newStats()
	for _, w := range f.workers {
		s := w.snapshot()
		total.add(&s)
	}
	return total
}

// Accepted returns the set of messages that a broker answered with OK or PUBACK.
func (f *Fleet) Accepted() *verify.Set {
	all := verify.NewSet(len(f.cfg.Sources))
	for _, w := range f.workers {
		all.Merge(w.accepted)
	}
	return all
}

// Captured returns the write times of messages, unordered; empty without Config.Capture.
func (f *Fleet) Captured() []mono.Time {
	var all []mono.Time
	for _, w := range f.workers {
		all = append(all, w.captured...)
	}
	return all
}

// bodySize is the actual body size of a message with the scheduled size.
func bodySize(size int32) int { return max(int(size), payload.Size) }
