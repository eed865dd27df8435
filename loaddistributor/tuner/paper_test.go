package tuner

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Whatever is measured, each plan of the paper's search divides at most the contract, with a token for
// each broker, and places each publisher at most once. This also holds with no more tokens than
// brokers, and for publishers without a place.
func TestPaperDividesTheContract(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var brokers []placement.Broker
		for i := range rapid.IntRange(1, 6).Draw(t, "brokers") {
			brokers = append(brokers, placement.Broker{ID: fmt.Sprintf("b%d", i), Mcap: rapid.Int64Range(10, 200).Draw(t, "mcap")})
		}
		demand := placement.Demand{Topic: "t", Rate: rapid.Int64Range(10, 300).Draw(t, "rate"), Burst: rapid.Int64Range(1, 6).Draw(t, "burst")}
		publishers := rapid.IntRange(1, 40).Draw(t, "publishers")
		for i := range publishers {
			demand.Publishers = append(demand.Publishers, placement.Publisher{
				ID: fmt.Sprintf("p%d", i), Key: rapid.SampledFrom([]string{"", "g", "h"}).Draw(t, "key"), Rate: float64(demand.Rate) / float64(publishers),
			})
		}
		paper, err := NewPaper(Setup{
			Policy: "srtm", Brokers: brokers, Demand: demand, Quantile: 0.99, Latency: time.Millisecond,
		}, time.Second, rand.New(rand.NewPCG(1, 2)))
		testkit.Must(t, err)
		var seen Observation
		for round := 0; ; round++ {
			if round > 1000 {
				t.Fatal("it does not end")
			}
			act := paper.Next(seen)
			var sum tokenbucket.Share
			placed := map[int]bool{}
			for _, q := range act.Plan.Quotas {
				if q.Share.Rate < 1 || q.Share.Burst < 1 {
					t.Fatalf("broker %s has the share %+v", q.Broker, q.Share)
				}
				sum.Rate += q.Share.Rate
				sum.Burst += q.Share.Burst
				for _, i := range q.Publishers {
					if placed[i] {
						t.Fatalf("publisher %d is placed twice", i)
					}
					placed[i] = true
				}
			}
			if sum.Rate > tokenbucket.Rate(demand.Rate*1000) || sum.Burst > demand.Burst {
				t.Fatalf("%+v of %d msg/s, burst %d", sum, demand.Rate, demand.Burst)
			}
			for _, i := range act.Plan.Unplaced {
				if placed[i] {
					t.Fatalf("publisher %d is placed and is not", i)
				}
				placed[i] = true
			}
			if len(placed) != publishers {
				t.Fatalf("%d of %d publishers are accounted for", len(placed), publishers)
			}
			if act.Final {
				return
			}
			seen = Observation{}
			for _, q := range act.Plan.Quotas {
				part := Part{Count: Count{Part: q.Broker, Delivered: 1000}, Quantile: time.Millisecond / 2}
				if rapid.Bool().Draw(t, "late") {
					part.Exceeded, part.Quantile = 500, 2*time.Millisecond
				}
				seen.Parts = append(seen.Parts, part)
			}
		}
	})
}
