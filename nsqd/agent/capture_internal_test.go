package agent

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
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
		testkit.Equal(t, o.captures["t"].until.Sub(1000), c.want, "asked for %v: it lasts", c.asked)
	}
}

// Each idle topic once took a message in each interval. With 2,900 topics the control plane handled
// nothing else.
func TestQuietTopicsShareAMessage(t *testing.T) {
	const topics = 2*maxQuiet + 500
	node := agenttest.New()
	o := joinedOwner(t, node)
	first := 0
	var names []string
	for i := range topics {
		name := fmt.Sprintf("t%04d", i)
		names = append(names, name)
		node.Create(name)
		o.capture(&srtmv1.CaptureArrivals{Topics: []string{name}, Lasts: durationpb.New(time.Minute)}, 0)
		for range len(o.control.out) {
			if (<-o.control.out).message.GetArrivals().First {
				first++
			}
		}
	}
	testkit.Equal(t, first, topics, "first pieces")

	// flush returns the quiet topics of a flush, and the topics with pieces.
	flush := func() (messages int, quiet, busy []string) {
		o.flushCaptures(1)
		for range len(o.control.out) {
			m := <-o.control.out
			o.control.arrivals.Add(-m.arrivals)
			a := m.message.GetArrivals()
			if a.Topic != "" {
				busy = append(busy, a.Topic)
			}
			quiet = append(quiet, a.Quiet...)
			messages++
		}
		return messages, quiet, busy
	}
	for range 3 {
		messages, quiet, busy := flush()
		testkit.Equal(t, messages, 3, "messages for %d quiet topics", topics)
		if !slices.Equal(quiet, names) || busy != nil {
			t.Errorf("%d topics are quiet and %d busy, want %d and none", len(quiet), len(busy), topics)
		}
		if messages, _, _ = flush(); messages > 0 {
			t.Errorf("%d messages after one interval, want none before the second", messages)
		}
	}
	node.Arrive(names[7], 0, agenttest.Arrival{At: 1, Publisher: "p"})
	node.Arrive(names[8], 1) // a lost message
	if _, quiet, busy := flush(); len(quiet) != topics-2 || len(busy) != 2 {
		t.Errorf("%d topics are quiet and %v busy, want %d and two", len(quiet), busy, topics-2)
	}
	node.Arrive(names[7], 0, agenttest.Arrival{At: 1, Publisher: "p"})
	if _, _, busy := flush(); !slices.Equal(busy, names[7:8]) {
		t.Errorf("%v are busy after one interval, want the topic with another arrival", busy)
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
