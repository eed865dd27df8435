package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// status is the part of /status that tests use: the contract with every tool.
type status struct {
	Classes []struct {
		Name   string
		Queued int
		Sent   uint64
		Used   map[string]float64
		Late   uint64 `json:"refused_late"`
		Full   uint64 `json:"refused_full"`
	}
	Servers []struct {
		URL             string
		InFlight        int `json:"in_flight"`
		Sent            uint64
		MeanDepartureMs float64 `json:"mean_departure_ms"`
		Ejected         bool
		Free, Capacity  map[string]float64
	}
}

// running is a gateway.
type running struct {
	URL, admin string
	policy     string // path of the policy file
	*local.Process
}

// start runs a gateway with a policy until the test ends.
func start(t testing.TB, policy string, flags ...string) *running {
	t.Helper()
	at := localtest.Ports(t, 2)
	file := testkit.File(t, "policy.toml", policy)
	process := localtest.Run(t, localtest.Racing(t, "gateway"), at[1]+"/healthz", append([]string{"--policy=" + file, "--http-address=" + at[0], "--admin-address=" + at[1]}, flags...)...)
	return &running{"http://" + at[0], "http://" + at[1], file, process}
}

func (g *running) status(t testing.TB) (s status) {
	t.Helper()
	testkit.Must(t, json.Unmarshal([]byte(localtest.MustAsk(t, http.MethodGet, g.admin+"/status", "")), &s))
	return s
}

const threeClasses = `
trusted_headers = ["X-Plan"]
[[class]]
name = "gold"
weight = 6
match = [{ header = "X-Plan: gold" }]
wait = "1m"
[[class]]
name = "silver"
weight = 3
match = [{ header = "X-Plan: silver" }]
wait = "1m"
[[class]]
name = "bronze"
weight = 1
wait = "1m"
`

// costs returns the costs of pages in a policy's form.
func costs() string {
	var b strings.Builder
	for path, units := range pages {
		fmt.Fprintf(&b, "[[cost]]\npath = %q\n", path)
		for name, u := range units {
			fmt.Fprintf(&b, "%s = %g\n", name, u)
		}
	}
	return b.String()
}

// The gateway's main job: two web servers, one twice as fast, receive more requests than they can
// take. Classes get 6:3:1 of every resource, and the faster server gets more requests.
func TestClassesShareEveryResource(t *testing.T) {
	overload(t, func(fast, slow string) string {
		return threeClasses + costs() + fmt.Sprintf(`
[[server]]
url = %q
cpu = 1000
disk = 1000
net = 1000
[[server]]
url = %q
cpu = 500
disk = 500
net = 500
`, fast, slow)
	}, "cpu", "disk", "net")
}

// With unknown servers and request costs, the gateway shares the servers' time, and detects the faster
// server.
func TestNothingIsKnown(t *testing.T) {
	overload(t, func(fast, slow string) string {
		return threeClasses + fmt.Sprintf("[[server]]\nurl = %q\n[[server]]\nurl = %q\n", fast, slow)
	}, "time")
}

// overload sends more requests than two servers can handle, and judges the classes' use of resources.
func overload(t *testing.T, policy func(fast, slow string) string, resources ...string) {
	fast := newBackend(t, map[string]float64{"cpu": 1000, "disk": 1000, "net": 1000})
	slow := newBackend(t, map[string]float64{"cpu": 500, "disk": 500, "net": 500})
	g := start(t, policy(fast.URL, slow.URL))
	client := newClient(t)
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer cancel()
	for _, class := range []string{"gold", "silver", "bronze"} {
		for path := range pages {
			for range 30 {
				clients.Go(func() {
					for ctx.Err() == nil {
						req, err := http.NewRequestWithContext(ctx, http.MethodGet, g.URL+path, nil)
						if err != nil {
							t.Error(err)
							return
						}
						req.Header.Set("X-Plan", class)
						res, err := client.Do(req)
						if err != nil {
							if ctx.Err() == nil {
								t.Error(err)
							}
							return
						}
						res.Body.Close()
						if res.StatusCode != http.StatusOK {
							t.Errorf("%s: %s", path, res.Status)
							return
						}
					}
				})
			}
		}
	}
	total := func(s status) (n uint64) {
		for _, c := range s.Classes {
			n += c.Sent
		}
		return n
	}
	var from, to status
	testkit.WaitFor(t, "requests that wait in every class", func() bool {
		from = g.status(t)
		return len(from.Classes) == 3 && from.Classes[0].Queued > 10 && from.Classes[1].Queued > 10 && from.Classes[2].Queued > 10 && total(from) > 100
	})
	// A class is owed its due until it gets it. The momentary load shifts a class's use by the cost of
	// the requests in flight, and the use comes back. Without weights it would never match.
	used := func(i int, resource string) float64 {
		return to.Classes[i].Used[resource] - from.Classes[i].Used[resource]
	}
	var last string
	defer func() { t.Log(last) }()
	testkit.WaitFor(t, "classes and servers with their shares", func() bool {
		to = g.status(t)
		for _, c := range to.Classes {
			if c.Queued == 0 { // its clients are slow, and ask for less than their share
				from = to
			}
		}
		if total(to) <= total(from)+800 {
			return false
		}
		for _, resource := range resources {
			gold, silver, bronze := used(0, resource), used(1, resource), used(2, resource)
			if gold < 4.5*bronze || gold > 7.5*bronze || silver < 2.2*bronze || silver > 3.8*bronze {
				last = fmt.Sprintf("%s: %.2f : %.2f : 1", resource, gold/bronze, silver/bronze)
				return false
			}
		}
		fast, slow := to.Servers[0].Sent-from.Servers[0].Sent, to.Servers[1].Sent-from.Servers[1].Sent
		last = fmt.Sprintf("the fast server got %d, the slow one %d", fast, slow)
		return fast >= slow*13/10 && fast <= slow*3
	})
}
