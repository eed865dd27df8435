package controller

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// dumps is a journal that counts dumps.
type dumps struct{ n atomic.Int64 }

func (d *dumps) Append(context.Context, uint64, []catalog.Event) error { return nil }
func (d *dumps) Compact(context.Context, catalog.Dump) error           { d.n.Add(1); return nil }
func (d *dumps) Lost() <-chan struct{}                                 { return nil }

// The store is also dumped after a number of publishers, but not for changes that name no publisher.
func TestDumpsComeByTheWeightOfEvents(t *testing.T) {
	c, journal := idle(t, 1), &dumps{}
	stop, ended := make(chan struct{}), make(chan error, 1)
	commits := &committer{&c.mu, c.cat, c.announcer, journal, slog.New(slog.DiscardHandler), prometheus.NewCounter(prometheus.CounterOpts{}), false}
	go func() { ended <- commits.run(context.Background(), stop) }()
	defer func() {
		close(stop)
		testkit.Must(t, <-ended)
	}()
	// change commits another specification of the topic. If whole is true, the log keeps the whole
	// specification.
	change := func(to func(*placement.Demand), whole bool) {
		t.Helper()
		c.mu.RLock()
		topic, _ := c.cat.next.Topic("t0")
		brokers := c.cat.next.Snapshot("t0")
		c.mu.RUnlock()
		spec := *topic.Spec
		spec.Demand.Publishers = slices.Clone(spec.Demand.Publishers)
		to(&spec.Demand)
		plan, err := placement.Place(spec.Policy, brokers, spec.Demand, nil)
		testkit.Must(t, err)
		moving, err := catalog.NewTopicChanging(topic, &spec, plan)
		testkit.Must(t, err)
		if kept := moving.Change() == nil; kept != whole {
			t.Fatalf("kept whole is %v, want %v", kept, whole)
		}
		testkit.Must(t, c.cat.commit(moving))
		testkit.Must(t, c.cat.commit(catalog.TopicMoved{Topic: "t0"}))
	}
	const publishers = 10_000
	c.mu.RLock()
	home := c.cat.committed.Topics("", 1)[0].Plan.Quotas[0].Broker
	c.mu.RUnlock()
	testkit.Must(t, c.cat.commit(catalog.BrokerJoined{ID: home, Instance: home, Mcap: publishers}))
	testkit.Must(t, c.cat.commit(catalog.MemberPrepared{Topic: "t0", Broker: home}))
	change(func(d *placement.Demand) {
		d.Rate, d.RateMilli, d.Groups = publishers, 1000*publishers, nil
		for i := range publishers {
			d.Publishers = append(d.Publishers, placement.Publisher{ID: fmt.Sprint("p", i), Rate: 1})
		}
	}, true)
	before := journal.n.Load()
	for i := range 31 {
		change(func(d *placement.Demand) { d.Burst = int64(20 + i) }, false)
	}
	if got := journal.n.Load() - before; got != 0 {
		t.Errorf("%d dumps after 31 small changes", got)
	}
	for i := range 31 {
		change(func(d *placement.Demand) {
			for p := range d.Publishers {
				d.Publishers[p].Batch = 1 + i%2
			}
		}, true)
	}
	if got := journal.n.Load() - before; got != 1 {
		t.Errorf("%d dumps of what weighs 31 times 334 and a few, want 1", got)
	}
}

// limited is a journal whose room a test controls.
type limited struct {
	dumps
	full  atomic.Bool
	tries atomic.Int64
}

func (l *limited) Append(context.Context, uint64, []catalog.Event) error {
	l.tries.Add(1)
	if l.full.Load() {
		return fmt.Errorf("append: %w: disk", ErrStoreFull)
	}
	return nil
}

// A full journal refuses requested changes. It keeps events that have happened until there is room,
// and continues. Decisions use the catalog of the durable and the kept events.
func TestAFullJournalRefusesChangesAndKeepsWhatHappened(t *testing.T) {
	c, journal := idle(t, 1), &limited{}
	stop, ended := make(chan struct{}), make(chan error, 1)
	commits := &committer{&c.mu, c.cat, c.announcer, journal, slog.New(slog.DiscardHandler), prometheus.NewCounter(prometheus.CounterOpts{}), false}
	home := c.cat.committed.Topics("", 1)[0].Plan.Quotas[0].Broker
	go func() { ended <- commits.run(context.Background(), stop) }()
	testkit.Must(t, c.cat.commit(catalog.BrokerCalibrated{ID: home, Mcap: 100})) // everything that New staged is durable
	c.mu.RLock()
	version := c.cat.committed.Version()
	c.mu.RUnlock()
	journal.full.Store(true)
	staged := func(e catalog.Event) ticket {
		c.mu.Lock()
		defer c.mu.Unlock()
		return testkit.Result(c.cat.stage(e)).Must(t)
	}
	joined := staged(catalog.BrokerJoined{ID: "b9", Instance: "one", Mcap: 10})
	calibrated := staged(catalog.BrokerCalibrated{ID: "b9", Mcap: 7})
	left := staged(catalog.BrokerLeft{ID: "b9"})
	testkit.ErrorIs(t, calibrated.wait(), ErrStoreFull, "a change")
	for range 2 {
		testkit.ErrorIs(t, c.cat.commit(catalog.BrokerCalibrated{ID: home, Mcap: 7}), ErrStoreFull, "a change while others wait")
	}
	c.mu.RLock()
	testkit.Equal(t, c.cat.committed.Version(), version, "version shown while the journal is full")
	b, _ := c.cat.next.Broker("b9")
	testkit.Equal(t, b.Mcap, 10, "capacity of the broker whose change was refused")
	testkit.Equal(t, len(c.cat.staged), 2, "events that wait")
	c.mu.RUnlock()

	journal.full.Store(false)
	testkit.NoError(t, joined.wait())
	testkit.NoError(t, left.wait())
	testkit.NoError(t, c.cat.commit(catalog.BrokerCalibrated{ID: "b9", Mcap: 7}))

	// A controller that stops reports the events that it could not store.
	journal.full.Store(true)
	again := staged(catalog.BrokerJoined{ID: "b9", Instance: "two", Mcap: 10})
	before := journal.tries.Load()
	testkit.WaitFor(t, "an attempt", func() bool { return journal.tries.Load() > before })
	close(stop)
	testkit.ErrorIs(t, again.wait(), ErrNotCommitted, "an event that found no room")
	testkit.ErrorIs(t, <-ended, ErrNotCommitted, "the end")
}
