package store

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// The record of a specification contains each part of the specification.
func TestSpecificationsAreKeptWhole(t *testing.T) {
	groups := []placement.Group{{Key: "g", Count: 2, Rate: 1, Weight: 9}}
	for name, change := range map[string]func(*catalog.Spec){
		"tenant": func(s *catalog.Spec) { s.Tenant = "acme" },
		"pacing": func(s *catalog.Spec) { s.Pacing = catalog.PacingPolice },
		"an open topic": func(s *catalog.Spec) {
			s.Demand.Open, s.Demand.Groups = true, nil
			s.Demand.Publishers, s.Since = []placement.Publisher{{ID: "p", Key: "learned-1", Rate: 1.25}}, []int64{1_700_000_000}
			s.Auto = catalog.Auto{MaxRate: 5, MinBurst: 6, MaxBurst: 7, Measured: true}
		},
		"expiry": func(s *catalog.Spec) {
			s.Expiry = expiry.Settings{TTL: time.Hour, MaxAttempts: 5, DeadLetter: "t.dead"}
			s.ChannelExpiry = map[string]expiry.Settings{"a": {TTL: time.Minute}, "b": {MaxAttempts: 9}}
		},
		"expiry of channels": func(s *catalog.Spec) { s.ChannelExpiry = map[string]expiry.Settings{"a": {TTL: time.Minute}} },
	} {
		plain := catalog.Spec{
			Demand: placement.Demand{Topic: "t", Rate: 100, RateMilli: 100_000, Burst: 10, Groups: groups},
			SLO:    catalog.SLO{Quantile: 0.99, Latency: time.Second}, Policy: placement.SRTM, ShareRule: "static",
		}
		want := plain
		change(&want)
		got := testkit.Result(toSpec(fromSpec(&want))).Must(t)
		if !got.Equal(&want) || got.Equal(&plain) {
			t.Errorf("%s: got %+v, want %+v", name, got, want)
		}
	}
}
