package placement

import (
	"fmt"
	"slices"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// million is a topic of the maximum number of publishers, which fills 100 brokers to four fifths. The
// publishers are in groups of 100, declared one by one, or in no groups.
func million(kind string) (Demand, []Broker) {
	d := Demand{Topic: "t", Rate: 1_000_000, Burst: 100_000}
	for g := range 10_000 {
		key := fmt.Sprint("g", g)
		if kind == "groups" {
			d.Groups = append(d.Groups, Group{Key: key, Count: 100, Rate: 1})
			continue
		}
		for i := range 100 {
			p := Publisher{ID: fmt.Sprintf("%s-%d", key, i), Rate: 1}
			if kind == "declared" {
				p.Key = key
			}
			d.Publishers = append(d.Publishers, p)
		}
	}
	var brokers []Broker
	for i := range 100 {
		brokers = append(brokers, Broker{ID: fmt.Sprintf("b%03d", i), Mcap: 12_500})
	}
	return d, brokers
}

// The goal: all publishers are placed in 100 ms. They are placed again within a second when half of
// them are new: on the same brokers, without one broker, with a broker of half its capacity, and on
// other brokers.
func BenchmarkMillion(b *testing.B) {
	for _, kind := range []string{"groups", "declared", "pool"} {
		d, brokers := million(kind)
		b.Run("place/"+kind, func(b *testing.B) {
			for b.Loop() {
				testkit.Result(Place(SRTM, brokers, d, nil)).Must(b)
			}
		})
		plan, err := Place(SRTM, brokers, d, nil)
		testkit.Must(b, err)
		names, _ := NewNames(d)
		homes := make([]string, names.Len())
		for _, q := range plan.Quotas {
			for _, i := range q.Publishers {
				homes[i] = q.Broker
			}
		}
		for i := range homes {
			if i%2 == 1 {
				homes[i] = "" // half of the publishers are new
			}
		}
		half := slices.Clone(brokers)
		half[3].Mcap /= 2
		others := slices.Clone(brokers)
		for i := range others {
			others[i].ID += "-new"
		}
		for name, now := range map[string][]Broker{"same": brokers, "gone": brokers[1:], "half": half, "others": others} {
			b.Run("replace/"+kind+"/"+name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					_, err := Replace(SRTM, now, plan, func(id string) string {
						i, _ := names.Index(id)
						return homes[i]
					}, d, nil)
					testkit.Must(b, err)
				}
			})
		}
	}
}
