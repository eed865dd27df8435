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

// Server is one machine. Its requests share its processors equally (processor sharing).
// One request uses at most one processor.
type Server struct {
	Name       string
	Processors int
	Speed      float64 // of a processor; demands are stated for speed 1
}

// Cluster is a set of servers and their load.
type Cluster struct {
	Name     string
	Servers  []Server
	Requests int
	Rate     float64 // requests/s on average
	// Burst is the range of the rate: each second has a rate uniform within 1-Burst ..
	// 1+Burst of Rate.
	Burst float64
}

// Assumptions that the paper does not state. None is fitted to the paper's results under
// JBQ.
const (
	// Demand is the mean processor time of a request. The paper's table III has 320 ms
	// for a server with a request every 2.7 s, which seldom has two at once.
	Demand = 320 * time.Millisecond
	// variation is the coefficient of variation of the lognormal demands, from table II
	// for the ten equal servers, including queueing (191/414).
	variation = 0.46
	// burst follows "the workload is very bursty"; figure 7 is not readable.
	burst = 1
	// hidden is the range of speeds in the larger clusters, uniform within 1-hidden ..
	// 1+hidden ("hidden heterogeneity"; figure 3 shows it without numbers).
	hidden = 0.2
)

// Clusters returns the names of the paper's clusters. The paper counts processing units:
// bronze has 1, silver 2, gold 4.
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

// Find returns a cluster of the paper. The seed determines the speeds of the larger two.
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

// Way is a balancing method.
type Way struct {
	Name    string
	Balance balance.Kind
	// Literal selects the paper's Join the Best Queue; Balance is ignored. The paper does not
	// state the estimate of an unmeasured server, T(0): it is Initial.
	Literal bool
	Initial time.Duration
	// SED selects shortest expected delay: least (1+Q) / (processors * speed). It knows the
	// capacities, which JBQ must estimate. Balance is ignored.
	SED bool
}

// Names of the ways.
const (
	Busy        = "busy"
	Literal     = "literal"   // T(0) as the gateway's
	LiteralZero = "literal-0" // T(0) = 0
	JBQ         = "jbq"
	RoundRobin  = "rr"
	SED         = "sed"
)

// Ways returns the methods that the figures compare.
func Ways() []Way {
	return []Way{
		{Name: Busy, Balance: balance.Busy},
		{Name: Literal, Literal: true, Initial: 100 * time.Millisecond},
		{Name: LiteralZero, Literal: true},
		{Name: JBQ},
		{Name: RoundRobin, Balance: balance.RoundRobin},
		{Name: SED, SED: true},
	}
}
