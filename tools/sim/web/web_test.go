package web_test

import (
	"math"
	"reflect"
	"testing"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/sim/web"
)

func one(processors int, speed, rate float64, requests int) web.Result {
	return web.Run(web.Study{Seed: 1, Cluster: web.Cluster{
		Servers: []web.Server{{Processors: processors, Speed: speed}}, Requests: requests, Rate: rate,
	}})
}

// Theory gives the mean for a single request and under processor sharing, for any demands.
func TestAgainstTheory(t *testing.T) {
	d := web.Demand.Seconds()
	for _, test := range []struct {
		name       string
		processors int
		speed      float64
		load       float64 // of a processor
		want       float64 // s
	}{
		{"idle", 1, 1, 0.01, d},
		{"idle, faster", 1, 2, 0.01, d / 2},
		{"M/G/1-PS", 1, 1, 0.7, d / (1 - 0.7)},
		{"M/M/2, which is close", 2, 1, 1.2, d / (1 - 0.36)}, // 1/(1-rho^2) by Erlang C
	} {
		r := one(test.processors, test.speed, test.load*test.speed/d, 30_000)
		if got := r.Overall.Mean / 1e3; math.Abs(got/test.want-1) > 0.06 {
			t.Errorf("%s: mean %.3f s, want %.3f", test.name, got, test.want)
		}
	}
}

func TestEveryRequestIsAnsweredAndTheSeedDecides(t *testing.T) {
	for _, name := range web.Clusters() {
		c := testkit.Result(web.Find(name, 7)).Must(t)
		c.Requests = 2000
		for _, way := range web.Ways() {
			s := web.Study{Cluster: c, Way: way, Seed: 7}
			r, again := web.Run(s), web.Run(s)
			if !reflect.DeepEqual(r, again) {
				t.Errorf("%s, %s: the same seed gave another result", name, way.Name)
			}
			sum, arrived := 0, 0
			for _, b := range r.ByServer {
				sum += b.Requests
			}
			for _, n := range r.PerSecond {
				arrived += n
			}
			if sum != c.Requests || arrived != c.Requests || len(r.Answers) != c.Requests || r.Overall.Requests != c.Requests {
				t.Errorf("%s, %s: %d requests at servers, %d arrived, %d answered, of %d", name, way.Name, sum, arrived, len(r.Answers), c.Requests)
			}
		}
	}
	if _, err := web.Find("large", 1); err == nil {
		t.Error("a cluster that the paper has not was found")
	}
}

// The paper's claim, by order and not by number: on unequal servers, JBQ uses the faster server more than bybusyness
// does, and its answer times are at least as even.
func TestJBQUsesTheFasterMore(t *testing.T) {
	c := testkit.Result(web.Find("small", 1)).Must(t)
	busy := web.Run(web.Study{Cluster: c, Way: web.Way{Balance: balance.Busy}, Seed: 1})
	jbq := web.Run(web.Study{Cluster: c, Seed: 1})
	if jbq.ByServer[0].Requests >= busy.ByServer[0].Requests || jbq.ByServer[2].Requests <= busy.ByServer[2].Requests ||
		jbq.Overall.Sd >= busy.Overall.Sd || jbq.Overall.P99 >= busy.Overall.P99 {
		t.Errorf("jbq %+v, busy %+v", jbq.ByServer, busy.ByServer)
	}
}
