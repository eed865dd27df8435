package controller

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// What is allocated stands for the topics that are looked at: to look at one is to copy
// what the catalog says of it.
func TestReconcileLooksAtNoTopicThatStays(t *testing.T) {
	looks := func(topics int) float64 {
		cat := catalog.New()
		apply := func(e catalog.Event) {
			t.Helper()
			if _, err := cat.Apply(e); err != nil {
				t.Fatal(err)
			}
		}
		for _, id := range []string{"b1", "b2"} {
			apply(catalog.BrokerJoined{ID: id, Instance: id, Mcap: int64(topics)})
		}
		for i := range topics {
			s := &catalog.Spec{
				Demand:    placement.Demand{Topic: fmt.Sprintf("t%d", i), Rate: 1, RateMilli: 1000, Burst: 1, Groups: []placement.Group{{Key: "g", Count: 1, Rate: 1}}},
				SLO:       catalog.SLO{Quantile: 0.99, Latency: time.Second},
				Policy:    placement.SRTM,
				ShareRule: "static",
			}
			plan, err := placement.Place(s.Policy, cat.Snapshot(), s.Demand, nil)
			if err != nil {
				t.Fatal(err)
			}
			apply(catalog.TopicPlaced{Spec: s, Plan: plan})
			apply(catalog.MemberPrepared{Topic: s.Name(), Broker: plan.Quotas[0].Broker})
			apply(catalog.TopicActivated{Topic: s.Name()})
		}
		c, err := New(Config{
			Catalog: cat, ReportInterval: time.Second, PrepareTimeout: time.Second, Window: time.Minute,
			Rebalance: RebalanceOff, Fitting: tuner.ModeFast, Log: slog.New(slog.DiscardHandler),
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
		now := time.Now()
		return testing.AllocsPerRun(10, func() { c.reconcile(now) })
	}
	if few, many := looks(10), looks(500); many > few+10 {
		t.Errorf("a turn without anything to do allocates %.0f times with 10 topics, %.0f times with 500", few, many)
	}
}
