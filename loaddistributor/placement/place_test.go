package placement_test

import (
	"fmt"
	"math/rand/v2"

	"github.com/srtm-io/srtm/loaddistributor/placement"
)

// paper is the setting of the paper's figure 8: six brokers with these loads, in thousands of messages
// per second, and room for 64 each.
func paper() []placement.Broker {
	var brokers []placement.Broker
	for i, k := range []int64{10, 40, 50, 60, 70, 80} {
		brokers = append(brokers, placement.Broker{ID: fmt.Sprintf("b%d", i+1), Mcap: 64_000, Allocated: k * 1000})
	}
	return brokers
}

// sensors is a topic of n publishers at 10 msg/s, in groups of 25. The publishers use the whole
// contract.
func sensors(n int) placement.Demand {
	d := placement.Demand{Topic: "t", Rate: int64(n) * 10, Burst: 100}
	for g := 0; n > 0; g++ {
		d.Groups = append(d.Groups, placement.Group{Key: fmt.Sprintf("g%d", g), Count: min(n, 25), Rate: 10})
		n -= 25
	}
	return d
}

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }
