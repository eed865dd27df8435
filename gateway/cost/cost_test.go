package cost

import (
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

func twoServers() *Table {
	return New([]string{"cpu", "disk", "unused"}, [][]float64{{1000, 50, 0}, {2000, 0, 0}}, 1)
}

func TestCapacitiesArePercentOfTheLargest(t *testing.T) {
	g := NewWithT(t)
	table := twoServers()
	g.Expect(table.Resources()).To(Equal([]string{"cpu", "disk"}))
	g.Expect(table.Capacity(0)).To(Equal(schedule.Vector{50, 100}))
	g.Expect(table.Capacity(1)).To(Equal(schedule.Vector{100, 100}))
	shared := New([]string{"cpu"}, [][]float64{{10}}, 4)
	g.Expect(shared.Capacity(0)).To(Equal(schedule.Vector{25}))
	unknown := New([]string{"cpu"}, [][]float64{{0}}, 1)
	g.Expect(unknown.Resources()).To(Equal([]string{Time, Bytes}))
	g.Expect(unknown.Capacity(0)).To(Equal(schedule.Vector{100, 100}))
}

// The sources of an estimated cost, in order: the server's report, the policy's units, reports of
// other requests, service time and bytes.
func TestEstimateUsesTheBestSource(t *testing.T) {
	g := NewWithT(t)
	table := twoServers()
	v := make(schedule.Vector, 2)
	percent := func(units, capacity float64) float64 { return 100 * units / capacity / Window.Seconds() }
	about := func(cpu, disk float64) {
		t.Helper()
		g.Expect(v[0]).To(BeNumerically("~", percent(cpu, 2000), 1e-9))
		g.Expect(v[1]).To(BeNumerically("~", percent(disk, 50), 1e-9))
	}
	r := table.Route("GET", "/report/7")
	known := []float64{20, .5, 3}
	table.Estimate(v, r, known)
	about(20, .5)

	report, err := table.ParseReport("TEXT request_cost.cpu=30")
	g.Expect(err).NotTo(HaveOccurred())
	table.Settle(v, r, known, time.Second, 10, &report, true)
	about(30, .5)
	table.Estimate(v, r, known)
	about(30, .5)
	table.Estimate(v, r, nil)
	about(30, 50.0/Together)
	g.Expect(table.Route("GET", "/report/8")).To(BeIdenticalTo(r))

	// A new route begins with the average of all routes.
	other := table.Route("POST", "/report/8")
	g.Expect(other).NotTo(BeIdenticalTo(r))
	table.Estimate(v, other, nil)
	about(2000.0/Together, 50.0/Together)

	// A failed request is charged and teaches nothing.
	table.Settle(v, other, nil, 2*time.Second, 0, &Report{}, false)
	about(2*2000.0/Together, 2*50.0/Together)
	table.Estimate(v, other, nil)
	about(2000.0/Together, 50.0/Together)

	// The newest of many reports weighs a tenth.
	report.cost[0] = 130
	table.Settle(v, r, nil, time.Second, 10, &report, true)
	table.Estimate(v, r, nil)
	about(40, 50.0/Together)
}

// The estimates forget a server's lies, or an hour-long stream, after a hundred requests.
func TestLiesAreForgotten(t *testing.T) {
	g := NewWithT(t)
	table := twoServers()
	r, v := table.Route("GET", "/"), make(schedule.Vector, 2)
	lie, err := table.ParseReport("TEXT request_cost.cpu=1e308")
	g.Expect(err).NotTo(HaveOccurred())
	table.Settle(v, r, nil, time.Hour, 1, &lie, true)
	honest, err := table.ParseReport("TEXT request_cost.cpu=4")
	g.Expect(err).NotTo(HaveOccurred())
	for range 100 {
		table.Settle(v, r, nil, time.Millisecond, 1, &honest, true)
	}
	table.Estimate(v, r, nil)
	g.Expect(v[0]).To(BeNumerically("~", 1, 1))
	g.Expect(v[1]).To(BeNumerically("<", 1))
}

func TestBytesWhereNothingIsKnown(t *testing.T) {
	g := NewWithT(t)
	table := New(nil, [][]float64{nil}, 1)
	v := make(schedule.Vector, 2)
	table.Estimate(v, table.Route("GET", "/"), nil)
	g.Expect(v[0]).To(BeNumerically("~", 100.0/64, 1e-9), "nothing was measured")
	table.Settle(v, table.Route("GET", "/"), nil, 100*time.Millisecond, bytesPerSecond/100, &Report{}, true)
	g.Expect(v[0]).To(BeNumerically("~", 100*.1/Together/.2, 1e-9))
	g.Expect(v[1]).To(BeNumerically("~", 5, 1e-9))
}

func TestPatterns(t *testing.T) {
	for path, want := range map[string]string{
		"/":                                  "GET /",
		"":                                   "GET /",
		"/a/b":                               "GET /a/b",
		"/user/17/photo":                     "GET /user/*/photo",
		"/%41":                               "GET /*",
		"/a/b/c/d/e/f/g/h":                   "GET /a/b/c/d/e/f/g/h",
		"/a/b/c/d/e/f/g/h/i/":                "GET /a/b/c/d/e/f/g/h/*",
		"/" + strings.Repeat("x", 33) + "/y": "GET /*/y",
	} {
		testkit.Equal(t, string(appendPattern(nil, "GET", path)), want, "%q", path)
	}
}

// A client that requests ever new paths removes no route that is in use.
func TestRoutesAreBounded(t *testing.T) {
	g := NewWithT(t)
	table := twoServers()
	kept := table.Route("GET", "/kept")
	name := func(i int) string {
		return "/" + strings.Map(func(r rune) rune { return r - '0' + 'a' }, fmt.Sprint(i))
	}
	for i := range 5 * MaxRoutes {
		table.Route("GET", name(i))
		g.Expect(table.Route("GET", "/kept")).To(BeIdenticalTo(kept))
	}
	g.Expect(len(table.routes)).To(BeNumerically("<=", MaxRoutes/2))
	g.Expect(table.old).To(HaveLen(MaxRoutes / 2))
}

func TestParseReportFormats(t *testing.T) {
	g := NewWithT(t)
	table := twoServers()
	for _, text := range []string{
		"TEXT cpu_utilization=0.5,request_cost.cpu=3e1, utilization.disk =0.9,named_metrics.inflight= 4,named_metrics.other=-0,rps_fractional=9",
		`JSON {"cpu_utilization":0.5,"request_cost":{"cpu":30,"gpu":1},"utilization":{"disk":0.9},"named_metrics":{"inflight":4},"rps":"7"}`,
		`json {"cpuUtilization":0.5,"requestCost":{"cpu":30},"utilization":{"disk":0.9},"namedMetrics":{"inflight":4}}`,
	} {
		r, err := table.ParseReport(text)
		g.Expect(err).NotTo(HaveOccurred(), text)
		g.Expect(r).To(Equal(Report{
			InFlight: 4, cost: [schedule.MaxResources]float64{30}, fields: 1,
			busy: [schedule.MaxResources]float64{.5, .9}, reports: 3,
		}), text)
	}
	for _, text := range []string{
		"", "TEXT", "TEXT ", "TEXT a", "TEXT cpu_utilization=x", "TEXT cpu_utilization=-1", "TEXT request_cost.cpu=NaN", "TEXT request_cost.cpu=Inf",
		"BIN AAAA", "cpu_utilization=0.5", "JSON", "JSON []", `JSON {"request_cost":{"cpu":-1}}`, "JSON {} {}", "TEXT a=1," + strings.Repeat("x", maxReport),
	} {
		r, err := table.ParseReport(text)
		g.Expect(err).To(HaveOccurred(), text)
		g.Expect(r).To(Equal(Report{InFlight: -1}), text)
	}
}

func FuzzReport(f *testing.F) {
	f.Add("TEXT cpu_utilization=0.5,request_cost.cpu=30, utilization.disk=0.9,named_metrics.inflight=4")
	f.Add(`JSON {"cpu_utilization":0.5,"request_cost":{"cpu":30},"utilization":{"disk":0.9},"named_metrics":{"inflight":4}}`)
	f.Add("JSON {\"cpu_utilization\":1e999}")
	f.Add("TEXT =,=1,.=1")
	f.Fuzz(func(t *testing.T, text string) {
		table := twoServers()
		r, err := table.ParseReport(text)
		if err != nil && r != (Report{InFlight: -1}) {
			t.Fatalf("%v, and %+v", err, r)
		}
		v := make(schedule.Vector, 2)
		route := table.Route("GET", text)
		table.Settle(v, route, nil, time.Second, 1, &r, true)
		table.Estimate(v, route, nil)
		for k := range v {
			if !(v[k] >= 0) || r.busy[k] < 0 || len(route.key) > 400 {
				t.Fatalf("%v of %+v, %q", v, r, route.key)
			}
		}
	})
}

func TestCapacityFollowsBusyReports(t *testing.T) {
	g := NewWithT(t)
	table := twoServers()
	now := mono.Time(time.Hour)
	whole := table.Capacity(0)
	say := func(busy, free float64, after time.Duration) bool {
		now = now.Add(after)
		r := Report{busy: [schedule.MaxResources]float64{busy}, reports: 1}
		return table.Observe(0, &r, schedule.Vector{free * whole[0] / 100, 0}, whole, now)
	}
	cpu := func() float64 { return whole[0] / table.Capacity(0)[0] }
	g.Expect(say(1, 50, 0)).To(BeFalse(), "it was silent before")
	g.Expect(say(1, 50, time.Second)).To(BeTrue())
	g.Expect(cpu()).To(BeNumerically("~", 1.1, 1e-9))
	for range 10 { // with the time that passes, not with reports
		say(1, 50, 100*time.Millisecond)
	}
	g.Expect(cpu()).To(BeNumerically("~", 1.21, 1e-9))
	g.Expect(say(1, 20, time.Second)).To(BeFalse())
	g.Expect(say(.95, 50, time.Second)).To(BeFalse())
	g.Expect(say(1, 50, 11*time.Second)).To(BeFalse(), "frozen by silence")
	g.Expect(cpu()).To(BeNumerically("~", 1.21, 1e-9))
	for range 100 {
		say(1, 50, time.Second)
	}
	g.Expect(cpu()).To(BeNumerically("~", 4, 1e-9))
	for range 100 {
		say(.5, 1, time.Second)
	}
	g.Expect(cpu()).To(BeNumerically("~", .25, 1e-9))
	g.Expect(table.Capacity(0)[1]).To(Equal(whole[1]), "nothing was said of it")
	g.Expect(table.Capacity(1)).To(Equal(schedule.Vector{100, 100}))
}

func TestAllocation(t *testing.T) {
	table := twoServers()
	v := make(schedule.Vector, 2)
	testkit.Equal(t, testing.AllocsPerRun(100, func() {
		r := table.Route("GET", "/report/7/pages")
		table.Estimate(v, r, nil)
		report, _ := table.ParseReport("TEXT request_cost.cpu=30,named_metrics.inflight=4")
		table.Settle(v, r, nil, time.Second, 1, &report, true)
	}), 0, "allocations of a request")
}
