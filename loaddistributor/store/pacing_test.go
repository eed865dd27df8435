package store

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// A release that does not pace refuses what says how a topic is paced, instead of
// forgetting it.
func TestPacingIsKept(t *testing.T) {
	s := &catalog.Spec{
		Demand: placement.Demand{Topic: "t", Rate: 100, RateMilli: 100_000, Burst: 10, Groups: []placement.Group{{Key: "g", Count: 2, Rate: 1, Weight: 9}}},
		SLO:    catalog.SLO{Quantile: 0.99, Latency: time.Second}, Policy: placement.SRTM, ShareRule: "static", Pacing: catalog.PacingPolice,
	}
	p := fromSpec(s)
	got, err := toSpec(p)
	if err != nil || !got.Equal(s) || got.Pacing != s.Pacing {
		t.Errorf("%+v, %v; want %+v", got, err, s)
	}
	testkit.Equal(t, version(p.ProtoReflect()), 2, "a record of version")
}

// So does what says that a topic has no list of publishers, and since when each is known.
func TestAnOpenTopicIsKept(t *testing.T) {
	s := &catalog.Spec{
		Demand: placement.Demand{Topic: "t", Rate: 100, RateMilli: 100_000, Burst: 10, Open: true, Publishers: []placement.Publisher{{ID: "p", Key: "learned-1", Rate: 1.25}}},
		SLO:    catalog.SLO{Quantile: 0.99, Latency: time.Second}, Policy: placement.SRTM, ShareRule: "static", Since: []int64{1_700_000_000},
		Auto: catalog.Auto{MaxRate: 5, MinBurst: 6, MaxBurst: 7, Measured: true},
	}
	p := fromSpec(s)
	got, err := toSpec(p)
	if err != nil || !got.Equal(s) || !got.Demand.Open || got.Since[0] != s.Since[0] {
		t.Errorf("%+v, %v; want %+v", got, err, s)
	}
	testkit.Equal(t, version(p.ProtoReflect()), 2, "a record of version")
}
