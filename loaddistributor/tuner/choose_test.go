package tuner

import (
	"fmt"
	"testing"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// 10,000 publishers in groups of 10, all on one broker.
func BenchmarkChoose(b *testing.B) {
	t := Suspect{Plan: placement.Plan{K: 1, Quotas: []placement.Quota{{Broker: "b1", Rate: 10_000}}}}
	for g := range 1000 {
		t.Demand.Groups = append(t.Demand.Groups, placement.Group{Key: fmt.Sprint("g", g), Count: 10, Rate: 1})
	}
	for i := range 10_000 {
		t.Plan.Quotas[0].Publishers = append(t.Plan.Quotas[0].Publishers, i)
	}
	for b.Loop() {
		if chosen, _ := choose(t, "b1", DefaultMaxPart, nil); len(chosen) != 500 {
			b.Fatal(len(chosen))
		}
	}
}
