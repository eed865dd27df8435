package controller

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/shortage"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// fleetOf returns a controller with two brokers of 4 msg/s that carry 4 topics of 1 msg/s. The
// controller does not run. announced receives the announced needs.
func fleetOf(t *testing.T) (c *Controller, log *strings.Builder, announced *[]shortage.Need) {
	c, log, announced = idle(t, 4), new(strings.Builder), new([]shortage.Need)
	for _, id := range []string{"b1", "b2"} {
		_, err := c.cat.next.Apply(catalog.BrokerJoined{ID: id, Instance: id, Mcap: 4})
		testkit.Must(t, err)
	}
	c.cfg.Log = slog.New(slog.NewTextHandler(log, nil))
	c.cfg.Lacking = func(n shortage.Need) { *announced = append(*announced, n) }
	return c, log, announced
}

// planTopic places a topic with the planner.
func (c *Controller) planTopic(t *testing.T, name string, rate int64) error {
	spec := &catalog.Spec{
		Demand:    placement.Demand{Topic: name, Rate: rate, RateMilli: rate * 1000, Burst: 10, Groups: []placement.Group{{Key: "g", Count: 10, Rate: float64(rate) / 10}}},
		SLO:       catalog.SLO{Quantile: 0.99, Latency: time.Second},
		Policy:    placement.SRTM,
		ShareRule: "static",
	}
	return c.owners.changes.planner.plan(t.Context(), name, func(p planning) (catalog.Event, error) {
		plan, err := placement.Place(spec.Policy, p.brokers, spec.Demand, p.rng)
		if err != nil {
			return nil, err
		}
		return catalog.NewTopicPlaced(spec, plan, "")
	}).Err
}

// looks runs the fleet once a second from start, until a number must have been announced. It
// returns the end.
func (c *Controller) looks(start time.Time) time.Time {
	end := start.Add(shortage.Held + 2*time.Second)
	for now := start; now.Before(end); now = now.Add(time.Second) {
		c.fleet.announce(now)
	}
	return end
}

func TestARefusedTopicNeedsABroker(t *testing.T) {
	c, log, announced := fleetOf(t)
	now := c.looks(time.Now())
	testkit.Equal(t, len(*announced), 1, "a new leader announces that nothing is lacking")
	testkit.Equal(t, (*announced)[0].Brokers, 0)
	if log.Len() > 0 {
		t.Errorf("the log is\n%s", log)
	}

	testkit.ErrorHas(t, c.planTopic(t, "big", 7), "infeasible")
	now = c.looks(now)
	testkit.Equal(t, len(*announced), 2)
	need := (*announced)[1]
	testkit.Equal(t, need, shortage.Need{Brokers: 1, Present: 2, Capacity: 8, Allocated: 4, Refused: 1, RefusedRate: 7})
	testkit.Equal(t, c.fleet.book.Announced(), 1)
	if !strings.Contains(log.String(), "more brokers are needed") {
		t.Errorf("the log is\n%s", log)
	}

	_, err := c.cat.committed.Apply(catalog.BrokerJoined{ID: "b3", Instance: "b3", Mcap: 4})
	testkit.Must(t, err)
	c.looks(now)
	testkit.Equal(t, len(*announced), 3)
	testkit.Equal(t, (*announced)[2].Brokers, 0)
	if !strings.Contains(log.String(), "brokers suffice again") {
		t.Errorf("the log is\n%s", log)
	}
}

// A topic that misses its SLO on all brokers needs another broker, as in the paper, until a
// broker comes or the topic goes.
func TestAnUnfittedTopicNeedsABroker(t *testing.T) {
	c, _, _ := fleetOf(t)
	need := func() int { return c.fleet.book.Need(c.fleet.cluster(), time.Now()).Brokers }
	_, err := c.cat.committed.Apply(catalog.BrokerLeft{ID: "b2"})
	testkit.Must(t, err)
	before := need()
	c.fleet.recordFit(tuner.Ended{Topic: "t0", Outcome: tuner.OutcomeMissed, Lacking: true})
	testkit.Equal(t, before, 0)
	testkit.Equal(t, need(), 1, "a topic on its only broker")
	c.fleet.recordFit(tuner.Ended{Topic: "t0", Outcome: tuner.OutcomeKept})
	testkit.Equal(t, need(), 0)
	c.fleet.recordFit(tuner.Ended{Topic: "gone", Outcome: tuner.OutcomeMissed, Lacking: true})
	testkit.Equal(t, need(), 0)
	testkit.Equal(t, len(c.fleet.missed), 0)
	c.fleet.recordFit(tuner.Ended{Topic: "t0", Outcome: tuner.OutcomeMissed, Lacking: true})
	_, err = c.cat.committed.Apply(catalog.BrokerJoined{ID: "b3", Instance: "b3", Mcap: 4})
	testkit.Must(t, err)
	testkit.Equal(t, need(), 0, "a broker has come")
}

func TestBrokersNeededIsExported(t *testing.T) {
	reg := prometheus.NewRegistry()
	_, err := New(Config{
		ReportInterval: time.Second, PrepareTimeout: time.Second, Window: time.Minute, Log: slog.New(slog.DiscardHandler), Metrics: reg,
	}, nil)
	testkit.Must(t, err)
	all, err := reg.Gather()
	testkit.Must(t, err)
	for _, family := range all {
		if family.GetName() == "srtm_brokers_needed" {
			return
		}
	}
	t.Error("there is no srtm_brokers_needed")
}
