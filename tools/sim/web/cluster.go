package web

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/gateway/balance"
)

// Server is one machine. Its requests share its processors alike (processor sharing),
// and one request uses at most one of them.
type Server struct {
	Name       string
	Processors int
	Speed      float64 // of a processor, 1 being the one that demands are stated for
}

// Cluster is servers and what is asked of them.
type Cluster struct {
	Name     string
	Servers  []Server
	Requests int
	Rate     float64 // requests/s on average
	// Burst: the rate of each second is uniform within 1-Burst .. 1+Burst of Rate.
	Burst float64
}

// What the paper does not state. Nothing here is fitted to its results under JBQ.
const (
	// Demand is the mean time of a processor that a request takes: the paper's table III
	// has 320 ms where a server gets a request in 2.7 s, so hardly ever two.
	Demand = 320 * time.Millisecond
	// variation is the demands' coefficient of variation, lognormal: what table II has
	// for the ten alike servers, queueing included (191/414).
	variation = 0.46
	// burst: "the workload is very bursty", and figure 7 cannot be read off.
	burst = 1
	// hidden: speeds are uniform within 1-hidden .. 1+hidden in the larger clusters
	// ("hidden heterogeneity"; figure 3 shows it, without numbers).
	hidden = 0.2
)

// Clusters are the paper's, by name. The paper counts processing units: bronze has 1,
// silver 2, gold 4.
func Clusters() []string { return slices.Sorted(maps.Keys(clusters())) }

func clusters() map[string]Cluster {
	return map[string]Cluster{
		"small":  {Servers: machines("bsg"), Requests: 40_000, Rate: 14.3, Burst: burst},
		"medium": {Servers: machines("bbgggsss"), Requests: 200_000, Rate: 29.96, Burst: burst},
		"silver": {Servers: machines("ssssssssss"), Requests: 50_000, Rate: 40, Burst: burst},
	}
}

func machines(kinds string) []Server {
	var all []Server
	for i, k := range kinds {
		m := map[rune]Server{'b': {"bronze", 1, 1}, 's': {"silver", 2, 1}, 'g': {"gold", 4, 1}}[k]
		m.Name = fmt.Sprintf("s%d (%s)", i+1, m.Name)
		all = append(all, m)
	}
	return all
}

// Find returns a cluster of the paper. The speeds of the larger two come from the seed.
func Find(name string, seed uint64) (Cluster, error) {
	c, ok := clusters()[name]
	if !ok {
		return c, fmt.Errorf("no cluster %q: there are %s", name, strings.Join(Clusters(), ", "))
	}
	c.Name = name
	if name != "small" {
		rng := rand.New(rand.NewPCG(seed, 1))
		for i := range c.Servers {
			c.Servers[i].Speed = 1 - hidden + 2*hidden*rng.Float64()
		}
	}
	return c, nil
}

// Way is how servers are chosen.
type Way struct {
	Name    string
	Balance balance.Kind
	Literal bool // Join the Best Queue as the paper has it; Balance is not looked at
}

// Ways are those that the figures compare.
func Ways() []Way {
	return []Way{
		{Name: "busy", Balance: balance.Busy},
		{Name: "literal", Literal: true},
		{Name: "jbq"},
		{Name: "rr", Balance: balance.RoundRobin},
	}
}
