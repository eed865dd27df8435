package agent

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

// joinedOwner is an owner that runs nothing. Its session is not read.
func joinedOwner(t *testing.T, node Node) *owner {
	t.Helper()
	a, err := New(Config{
		LoadDistributor: "ld:1", BrokerID: "b", TCPAddress: "b:1", HTTPAddress: "b:2", Mcap: 1, Log: slog.New(slog.DiscardHandler),
	}, node)
	testkit.Must(t, err)
	o := newOwner(&a.core, t.Context(), &sync.WaitGroup{})
	o.flush = time.NewTimer(time.Hour)
	_, cut := context.WithCancelCause(t.Context())
	o.control = &controlLink{out: make(chan queued[srtmv1.BrokerMessage], linkQueue), cut: cut}
	return o
}

func TestACaptureLastsAMinuteAtMost(t *testing.T) {
	node := agenttest.New()
	node.Create("t")
	o := joinedOwner(t, node)
	for _, c := range []struct{ asked, want time.Duration }{
		{24 * time.Hour, time.Minute},
		{5 * time.Second, 5 * time.Second}, // a second request counts from its own time
		{time.Minute, time.Minute},
	} {
		o.capture(&srtmv1.CaptureArrivals{Topic: "t", Lasts: durationpb.New(c.asked)}, 1000)
		testkit.Equal(t, o.captures["t"].Sub(1000), c.want, "asked for %v: it lasts", c.asked)
	}
}

// If the other side does not read, pieces stay in the record, which the broker must bound. Arrivals in the record at the
// end count as lost.
func TestACaptureThatNobodyReads(t *testing.T) {
	node := agenttest.New()
	node.Create("t")
	o := joinedOwner(t, node)
	ask := func(lasts time.Duration) {
		o.capture(&srtmv1.CaptureArrivals{Topic: "t", Lasts: durationpb.New(lasts)}, 0)
	}
	arrive := func() {
		if !node.Arrive("t", 0, make([]agenttest.Arrival, arrivalsQueue/4)...) {
			t.Fatal("not captured")
		}
	}
	ask(time.Second)
	if first := <-o.control.out; !first.message.GetArrivals().GetFirst() {
		t.Fatalf("not a first piece: %v", first.message)
	}
	for i := range 6 {
		arrive()
		o.flushCaptures(0)
		if want := min(i+1, 4); len(o.control.out) != want {
			t.Fatalf("%d pieces are queued after %d, want %d", len(o.control.out), i+1, want)
		}
	}
	// The sender writes one message.
	m := <-o.control.out
	o.control.arrivals.Add(-m.arrivals)
	o.flushCaptures(0)
	if got := o.control.arrivals.Load(); got != 5*arrivalsQueue/4 || len(o.control.out) != 4 {
		t.Fatalf("%d messages in %d pieces are queued, want %d in 4: what had to wait comes in one", got, len(o.control.out), 5*arrivalsQueue/4)
	}

	arrive()
	ask(0)
	o.flushCaptures(0)
	if len(o.control.out) != 4 || len(o.captures) > 0 || node.Captured("t") {
		t.Errorf("%d pieces are queued, %d captures, %v; want 4, none", len(o.control.out), len(o.captures), node.Captured("t"))
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(o.metrics.captured)
	families := testkit.Result(registry.Gather()).Must(t)
	got := map[string]float64{}
	for _, m := range families[0].Metric {
		got[m.Label[0].GetValue()] = m.GetCounter().GetValue()
	}
	if want := map[string]float64{"sent": 6 * arrivalsQueue / 4, "lost": arrivalsQueue / 4}; !maps.Equal(got, want) {
		t.Errorf("messages %v, want %v", got, want)
	}
}
