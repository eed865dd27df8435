package link

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

// basic is the paper's basic setting at a part of its size.
func basic(control string) Config {
	return Config{
		Capacity: 50e6, RTT: 60 * time.Millisecond, Flows: 50, ToS: []int{1, 2, 4, 8, 10},
		Duration: 4 * time.Second, Seed: 1, Control: control, Buffer: 1,
	}
}

// parts returns the mean throughput of honest flows by ToS, and of greedy flows by their own ToS. The unit is the
// capacity divided by the sum of all ToS, per ToS.
func parts(c Config, r Result) (honest, greedy map[int]float64) {
	sum, n := map[Flow]float64{}, map[Flow]float64{}
	all := 0
	for _, f := range r.Flows {
		all += f.ToS
		k := Flow{ToS: f.ToS, Greedy: f.Greedy}
		sum[k], n[k] = sum[k]+f.Throughput/float64(f.ToS), n[k]+1
	}
	honest, greedy = map[int]float64{}, map[int]float64{}
	for k := range sum {
		part := sum[k] / n[k] / (c.Capacity / float64(all))
		if k.Greedy {
			greedy[k.ToS] = part
		} else {
			honest[k.ToS] = part
		}
	}
	return honest, greedy
}

func TestFlowsShareByToS(t *testing.T) {
	for control, want := range map[string]struct{ near, utilization, queue float64 }{
		Paper: {0.6, 0.85, 0.5}, // whole packets, in bunches
		Paced: {0.05, 0.9, 0.02},
		Level: {0.03, 0.97, 0.05},
	} {
		c := basic(control)
		r := Run(c)
		honest, _ := parts(c, r)
		for tos, part := range honest {
			if math.Abs(part/honest[10]-1) > want.near {
				t.Errorf("%s: ToS %d has %.3f of its part, 10 has %.3f", control, tos, part, honest[10])
			}
		}
		if r.Utilization < want.utilization || r.Utilization > 1 || r.QueueMean > want.queue || r.Drops > 0 {
			t.Errorf("%s: utilization %v, queue %v to %v, %d drops", control, r.Utilization, r.QueueMean, r.QueueMax, r.Drops)
		}
	}
}

// At 50 Mb/s a flow of ToS 1 has a window of 1.5 packets: the paper's dip.
func TestWholeWindowsDip(t *testing.T) {
	for control, low := range map[string]bool{Paper: true, Paced: false} {
		c := basic(control)
		honest, _ := parts(c, Run(c))
		testkit.Equal(t, honest[1] < 0.75*honest[10], low, "%s: ToS 1 has %v of its part, 10 has %v", control, honest[1], honest[10])
	}
}

func TestUntrustedFlowsAreHeld(t *testing.T) {
	for _, control := range []string{Paper, Level} {
		c := basic(control)
		c.Greedy = 5
		honest, greedy := parts(c, Run(c))
		if greedy[1] < 10 || honest[1] > 0.5 {
			t.Errorf("%s without police: who claims 255 has %v of its part, others %v", control, greedy[1], honest[1])
		}
		c.Police = true
		honest, greedy = parts(c, Run(c))
		for tos, part := range greedy {
			if part > 1.25*honest[10] || honest[10] < 0.8 {
				t.Errorf("%s with police: an untrusted flow of ToS %d has %v of its part, others %v", control, tos, part, honest[10])
			}
		}
	}
}

// ACKs that wait behind data of the other direction arrive in bunches, and whole windows leave as
// bunches. ACKs that bypass the queues leave the queue of the paper's rules almost empty.
func TestACKsThatBypassQueues(t *testing.T) {
	c := basic(Paper)
	c.Capacity, c.Bypass = 300e6, true
	r := Run(c)
	c.Bypass = false
	queued := Run(c)
	if r.Utilization < 0.98 || r.QueueMean > 0.001 || queued.QueueMean < 20*r.QueueMean {
		t.Errorf("bypassing: utilization %v, queue %v; queued: %v", r.Utilization, r.QueueMean, queued.QueueMean)
	}
}

// Flows that cross three links have the rate of the most congested one. 25 other flows of the
// second link have what remains: twice as much by ToS. The paper's routers assume that all flows
// take the rate, so the paper's rules leave a part of the second link unused.
func TestSeveralRouters(t *testing.T) {
	for control, want := range map[string]struct{ through, crossing, utilization float64 }{
		Paced: {0.97, 1.33, 0.82},
		Level: {1, 2, 1},
	} {
		c := basic(control)
		c.Routers, c.Cross, c.Bypass, c.Duration = 3, 25, true, 10*time.Second
		r := Run(c)
		ideal := c.Capacity / 500 // 50 flows and 50 crossing ones, of 5 each in the mean
		part := func(flows []Flow) (sum float64) {
			for _, f := range flows {
				sum += f.Throughput / float64(f.ToS) / ideal / float64(len(flows))
			}
			return sum
		}
		got := []float64{part(r.Flows), part(r.Crossing[:25]), r.Links[1].Utilization}
		for i, w := range []float64{want.through, want.crossing, want.utilization} {
			if math.Abs(got[i]-w) > 0.04 {
				t.Errorf("%s: through, crossing, utilization %v, want %v", control, got, want)
				break
			}
		}
		if len(r.Links) != 3 || r.Links[2] != r.Link {
			t.Errorf("%s: links %+v, want three and the last as the result", control, r.Links)
		}
	}
}

// Fifty flows more, and then fewer: figure 6.
func TestFlowsThatJoin(t *testing.T) {
	c := basic(Level)
	c.Duration, c.Sample = 15*time.Second, 100*time.Millisecond
	c.Join, c.From, c.To = 50, 5*time.Second, 10*time.Second
	r := Run(c)
	at := func(from, to time.Duration) (part, utilization float64) {
		n := 0.0
		for _, s := range r.Series {
			if s.At > from && s.At <= to {
				part, utilization, n = part+s.Throughput[4], utilization+s.Utilization, n+1
			}
		}
		return part / n / (10 * c.Capacity / 250), utilization / n
	}
	before, u0 := at(4*time.Second, 5*time.Second)
	among, u1 := at(9*time.Second, 10*time.Second)
	after, u2 := at(14*time.Second, 15*time.Second)
	if math.Abs(among/before-0.5) > 0.03 || math.Abs(after/before-1) > 0.03 || min(u0, u1, u2) < 0.98 || r.Drops > 0 {
		t.Errorf("before %v of the part, among 100 flows %v, after them %v; utilization %v, %v, %v; %d drops", before, among, after, u0, u1, u2, r.Drops)
	}
}

func TestShortFlowsEnd(t *testing.T) {
	c := basic(Paced)
	c.Web = 100
	r := Run(c)
	honest, _ := parts(c, r)
	if r.Utilization < 0.85 || honest[10] < 0.2 || honest[10] > 0.7 {
		t.Errorf("utilization %v, the part of the long flows %v", r.Utilization, honest[10])
	}
}

func TestWire(t *testing.T) {
	w := &wire{capacity: 1000, buffer: 2500, half: time.Second, notice: 3 * time.Second}
	now := mono.Time(0)
	for range 3 { // the third does not fit
		w.send(now, packet{}, 1000)
	}
	if w.flying.Len() != 2 || w.drops != 1 || due(&w.lost) != mono.Time(3*time.Second) {
		t.Fatalf("%d sent, %d dropped, the sender knows at %v", w.flying.Len(), w.drops, due(&w.lost))
	}
	for _, want := range []time.Duration{2 * time.Second, 3 * time.Second} {
		if at := w.flying.Pop().at; at != mono.Time(want) {
			t.Errorf("a packet arrives at %v, want %v", time.Duration(at), want)
		}
	}
	if due(&w.flying) != mono.Never {
		t.Errorf("a packet is due at %v, want none", due(&w.flying))
	}
	w.observe(mono.Time(10 * time.Second))
	if math.Abs(w.area-2000) > 1e-6 || w.longest != 2000 || w.least != 0 {
		t.Errorf("area %v, longest %v, least %v; want 2000 byte seconds, 2000, 0", w.area, w.longest, w.least)
	}
}

func TestValidateSaysAll(t *testing.T) {
	err := Config{ToS: []int{0, 256}, Control: "other", Greedy: 1, Join: -1, Web: math.NaN(), Sample: -1, Theta: -1, Routers: 17, Cross: -1}.Validate()
	for _, want := range []string{"capacity", "RTT", "0 flows", "ToS 0", "ToS 256", "duration", "other", "buffer", "greedy", "theta", "-1 flows", "NaN short", "samples", "17 routers", "-1 crossing"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q in it", err, want)
		}
	}
	testkit.NoError(t, basic(Paper).Validate())
}
