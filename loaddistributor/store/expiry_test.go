package store

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

func TestTheJournalKeepsExpiry(t *testing.T) {
	s := &catalog.Spec{
		Demand: placement.Demand{Topic: "t", Rate: 100, RateMilli: 100_000, Burst: 10, Groups: []placement.Group{{Key: "g", Count: 2, Rate: 1}}},
		SLO:    catalog.SLO{Quantile: 0.99, Latency: time.Second}, Policy: placement.SRTM, ShareRule: "static",
		Expiry:        expiry.Settings{TTL: time.Hour, MaxAttempts: 5, DeadLetter: "t.dead"},
		ChannelExpiry: map[string]expiry.Settings{"a": {TTL: time.Minute}, "b": {MaxAttempts: 9}},
	}
	got, err := toSpec(fromSpec(s))
	testkit.Must(t, err)
	if !got.Equal(s) {
		t.Errorf("got %+v, want %+v", got, s)
	}
	s.ChannelExpiry = nil
	if got.Equal(s) {
		t.Error("Equal ignores the settings of channels")
	}
}
