package tuner

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

var capturing = RebalanceConfig{Sustained: 20 * time.Second, Cooldown: 30 * time.Second, MaxPart: DefaultMaxPart, Capture: DefaultCapture}

// bursts is a topic of 400 publishers, half of them on b1. There 20 publishers send at once, all in
// turn, every 100 ms for 4 s. late messages of each burst were late.
func bursts(t *testing.T, late int) (Suspect, *Evidence) {
	t.Helper()
	d := placement.Demand{Topic: "t", Rate: 400, Burst: 40, Groups: []placement.Group{{Key: "g", Count: 400, Rate: 1}}}
	brokers := []placement.Broker{{ID: "b1", Mcap: 300}, {ID: "b2", Mcap: 300}}
	p := testkit.Result(placement.Place(placement.SRTM, brokers, d, nil)).Must(t)
	for i := range brokers {
		brokers[i].Allocated = 200
	}
	publishers := p.Quotas[0].Publishers
	e := &Evidence{
		Broker: "b1", Share: tokenbucket.Share{Rate: tokenbucket.PerSecond(250), Burst: 20},
		Load: Load{Broker: "b1", Delivered: 800, Exceeded: uint64(40 * late)}, Unloaded: time.Millisecond,
	}
	for burst := range 40 {
		for i := range 20 {
			e.Arrivals = append(e.Arrivals, Arrival{At: mono.Time(burst) * mono.Time(100*time.Millisecond), Publisher: int32(publishers[(burst*20+i)%len(publishers)])})
		}
	}
	return Suspect{
		Quantile: 0.99, Latency: 10 * time.Millisecond, Plan: p, Demand: d, Brokers: brokers,
		Loads: []Load{{Broker: "b1", Delivered: 2000, Exceeded: uint64(100 * late)}, {Broker: "b2", Delivered: 2000}},
	}, e
}

// suspect runs until the broker is suspected.
func suspect(t *testing.T, w *Watch, suspected Suspect, start int) (second int) {
	t.Helper()
	for s := start; s < start+100; s++ {
		switch m, v := w.Decide(atSecond(s), capturing, suspected); v {
		case Nothing:
		case Suspected:
			if m.From != "b1" || m.Publishers != nil {
				t.Fatalf("suspected: %+v", m)
			}
			return s
		default:
			t.Fatalf("verdict %d at %d without evidence", v, s)
		}
	}
	t.Fatal("no broker is suspected")
	return 0
}

func TestTheReplayDecides(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Suspect, *Evidence)
		want   Finding
		reason string
	}{
		"the broker is too slow": {func(*Suspect, *Evidence) {}, Overloaded, "0 % by a replay of 800 arrivals"},
		// 6 of each 20 messages wait, 5 to 30 ms, and five of them for more than 9 ms.
		"the bucket is too small": {func(_ *Suspect, e *Evidence) {
			e.Share = tokenbucket.Share{Rate: tokenbucket.PerSecond(200), Burst: 14}
		}, BucketLimited, "by a replay"},
		"it held nothing": {func(_ *Suspect, e *Evidence) { e.Share = tokenbucket.Share{} }, BucketLimited, "tokens explain 100 % by a replay"},
		// A consumer or a broker so slow that an unloaded message is late, with enough tokens.
		"it is late without load": {func(_ *Suspect, e *Evidence) {
			e.Unloaded, e.Load.Exceeded = 20*time.Millisecond, e.Load.Delivered
		}, Overloaded, "100 % late, of which tokens explain 0 % by a replay of 800 arrivals and 0 % by reports"},
		"reports know better":  {func(_ *Suspect, e *Evidence) { e.Load.Waited = e.Load.Exceeded }, BucketLimited, "15 % by reports"},
		"nothing was recorded": {func(_ *Suspect, e *Evidence) { e.Arrivals = nil }, Overloaded, "too few arrivals"},
		"it is over":           {func(_ *Suspect, e *Evidence) { e.Arrivals, e.Load.Exceeded = nil, 0 }, BucketLimited, "too few arrivals"},
	} {
		t.Run(name, func(t *testing.T) {
			var w Watch
			suspected, e := bursts(t, 3)
			s := suspect(t, &w, suspected, 0)
			testkit.Equal(t, s, 20, "suspected at")
			c.change(&suspected, e)
			suspected.Recorded, suspected.Evidence = "b1", e
			m, v := w.Decide(atSecond(s+5), capturing, suspected)
			if v != c.want || m.From != "b1" || !strings.Contains(m.Reason, c.reason) || (v == Overloaded) != (m.To == "b2" && len(m.Publishers) > 0) {
				t.Fatalf("verdict %d: %+v", v, m)
			}
			// The same verdict does not come again at once, whichever it was.
			suspected.Recorded, suspected.Evidence = "", nil
			again := 45
			if c.want == Overloaded {
				again = 55 // the cooldown, which is longer
			}
			if s := suspect(t, &w, suspected, s+6); s != again+1 && s != again {
				t.Errorf("suspected again at %d, want %d", s, again)
			}
		})
	}
}

// An answer about one broker is used for this broker only. The broker keeps its turn even if another
// broker is worse by then.
func TestOneAfterTheOther(t *testing.T) {
	var w Watch
	suspected, e := bursts(t, 3)
	suspected.Loads[1].Exceeded = 200
	suspected.Brokers = append(suspected.Brokers, placement.Broker{ID: "b3", Mcap: 1000})
	s := suspect(t, &w, suspected, 0)
	suspected.Loads[1].Exceeded = 1000
	if m, v := w.Decide(atSecond(s), capturing, suspected); v != Suspected || m.From != "b2" {
		t.Fatalf("the worst: %d, %+v", v, m)
	}
	suspected.Recorded = "b1"
	if m, v := w.Decide(atSecond(s), capturing, suspected); v != Suspected || m.From != "b1" {
		t.Fatalf("the one that is being asked: %d, %+v", v, m)
	}
	suspected.Evidence = e
	if m, v := w.Decide(atSecond(s), capturing, suspected); v != Overloaded || m.From != "b1" || m.To != "b3" {
		t.Fatalf("with evidence: %d, %+v", v, m)
	}
}

// A broker that absorbs 17 of bursts of 20 keeps the SLO with bursts of 17, so three publishers of
// each burst leave.
func TestNoMoreThanItTakes(t *testing.T) {
	suspected, e := bursts(t, 3)
	for i := range e.Arrivals { // always the same 20
		e.Arrivals[i].Publisher = int32(suspected.Plan.Quotas[0].Publishers[i%20])
	}
	moved := suspected.Plan.Quotas[0].Publishers[:20]
	if n, ok := e.fewest(suspected, moved); !ok || n != 3 {
		t.Errorf("%d, %v; want 3", n, ok)
	}
	if n, ok := e.fewest(suspected, moved[:2]); ok {
		t.Errorf("two are enough: %d", n)
	}
	var w Watch
	s := suspect(t, &w, suspected, 0)
	suspected.Recorded, suspected.Evidence = "b1", e
	m, v := w.Decide(atSecond(s), capturing, suspected)
	if v != Overloaded || !slices.Equal(m.Publishers, moved[:3]) {
		t.Errorf("verdict %d: %+v", v, m)
	}
	// If all messages are late, 5 % of 400 publishers are not enough: a tenth of the broker's rate
	// moves.
	suspected, e = bursts(t, 20)
	w = Watch{}
	s = suspect(t, &w, suspected, 0)
	suspected.Recorded, suspected.Evidence = "b1", e
	if m, v := w.Decide(atSecond(s), capturing, suspected); v != Overloaded || len(m.Publishers) != 20 {
		t.Errorf("verdict %d: %d publishers", v, len(m.Publishers))
	}
}
