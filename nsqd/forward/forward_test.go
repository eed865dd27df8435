package forward_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/origin"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/forward"
	"github.com/srtm-io/srtm/pacing/police"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func start(t *testing.T, loaddistributor string) (*forward.Forwarder, *prometheus.Registry) {
	t.Helper()
	metrics := prometheus.NewRegistry()
	f := testkit.Result(forward.New(forward.Config{
		LoadDistributor: loaddistributor, MaxConnections: 1000, MaxBytes: 1 << 20, Log: slog.New(slog.DiscardHandler), Metrics: metrics,
	})).Must(t)
	f.SetBroker("b1", "")
	ctx, stop := context.WithCancel(context.Background())
	over := make(chan error, 1)
	go func() { over <- f.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		testkit.NoError(t, <-over)
	})
	return f, metrics
}

func TestKeysOfTwoLeadersCount(t *testing.T) {
	f, _ := start(t, "127.0.0.1:1")
	first, second, third := []byte("first"), []byte("second"), []byte("third")
	secret := func(key []byte) []byte { return []byte(origin.Secret(key, origin.Origin{Broker: "b2"}.String())) }
	counts := func(key []byte) bool {
		o, err := f.Origin(secret(key))
		return err == nil && o.Broker == "b2"
	}
	testkit.Equal(t, counts(nil), false, "before there is a key")
	f.SetKey(first)
	f.SetKey(second)
	f.SetKey(second) // the same loaddistributor again
	testkit.Equal(t, counts(first), true, "the key of the leader before")
	testkit.Equal(t, counts(second), true)
	f.SetKey(third)
	testkit.Equal(t, counts(first), false, "the key before that")
	testkit.Equal(t, counts(third), true)
}

// The forwarder returns a refusal by the target unchanged, and passes the origin and the publisher to the target.
func TestVerdictsOfTheTarget(t *testing.T) {
	log := &fake.Log{}
	target := testkit.Result(fake.NewBroker("b2", log)).Must(t)
	t.Cleanup(target.Close)
	placement := testkit.Result(fake.NewPlacement()).Must(t)
	t.Cleanup(placement.Close)
	placement.Place("t", target.Address(), "sensor")
	f, metrics := start(t, placement.Address())
	f.SetKey([]byte("the key"))
	line := f.Line(forward.Publisher{ClientID: "sensor", Identity: police.Identity{Kind: "client", ID: "sensor"}, Host: "10.0.0.7"})
	defer line.Close()
	publish := func(topic, body string) error {
		return line.Begin(t.Context(), topic, pool.Message{Body: []byte(body)}).Verdict(wire.CodePubFailed)
	}
	testkit.NoError(t, publish("t", "taken"))
	shown := 0
	for _, e := range log.Events() {
		if e.Kind == fake.Auth {
			shown++
			o := testkit.Result(origin.Parse(e.Bodies[0], []byte("the key"))).Must(t)
			testkit.Equal(t, o, origin.Origin{ClientID: "sensor", Kind: "client", ID: "sensor", Host: "10.0.0.7", Broker: "b1"})
		}
	}
	testkit.MustEqual(t, shown, 1)
	target.Refuse(func(string, []byte) *wire.Error { return wire.NewError(wire.CodeQueueFull, "no room") })
	if err := publish("t", "refused"); err == nil || err.Error() != "E_QUEUE_FULL no room" {
		t.Errorf("a full target: %v", err)
	}
	target.Refuse(nil)
	testkit.NoError(t, publish("t", "taken"))
	if err := publish("unknown", "x"); err == nil || !strings.HasPrefix(err.Error(), "E_BAD_TOPIC") || !strings.Contains(err.Error(), "srtm topic create") {
		t.Errorf("an unknown topic: %v", err)
	}
	want := fmt.Sprintf(`
# HELP srtm_nsqd_forwarded_total Publishes that were forwarded to another broker (target, its address; none: no broker was found; other: one of many), by what became of them: accepted; refused; unanswered, so that they may have been accepted; unsent.
# TYPE srtm_nsqd_forwarded_total counter
srtm_nsqd_forwarded_total{result="accepted",target=%[1]q} 2
srtm_nsqd_forwarded_total{result="refused",target=%[1]q} 1
srtm_nsqd_forwarded_total{result="unsent",target="none"} 1
`, target.Address())
	testkit.NoError(t, testutil.GatherAndCompare(metrics, strings.NewReader(want), "srtm_nsqd_forwarded_total"))
}

// A broker of a release without attributes would take an attribute for a part of its message.
func TestAttributesAreNotSentToOldBrokers(t *testing.T) {
	log := &fake.Log{}
	target := testkit.Result(fake.NewBroker("b2", log)).Must(t) // answers AUTH as such a release does
	t.Cleanup(target.Close)
	placement := testkit.Result(fake.NewPlacement()).Must(t)
	t.Cleanup(placement.Close)
	placement.Place("t", target.Address(), "sensor")
	f, _ := start(t, placement.Address())
	f.SetKey([]byte("the key"))
	line := f.Line(forward.Publisher{ClientID: "sensor", Identity: police.Identity{Kind: "client", ID: "sensor"}})
	defer line.Close()
	// untilTried returns a context that ends after a client's second attempt to connect.
	untilTried := func(client string) context.Context {
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			testkit.WaitFor(t, "two attempts", func() bool {
				return len(slices.DeleteFunc(log.Events(), func(e fake.Event) bool { return e.Kind != fake.Auth || e.Client != client })) > 1
			})
			cancel()
		}()
		return ctx
	}
	if err := line.Begin(untilTried("sensor"), "t", pool.Message{Body: []byte("body"), Attribute: []byte("attribute")}).Wait(); err == nil {
		t.Error("an old broker has taken an attribute")
	}
	_, err := f.Subscribe(untilTried("reader"), "t", "c", forward.Subscriber{Publisher: forward.Publisher{ClientID: "reader"}, MsgTimeout: time.Minute, Attributes: true}, func() {})
	if err == nil || !strings.Contains(err.Error(), origin.ErrAttributes.Error()) {
		t.Errorf("a subscription that needs attributes: %v", err)
	}
	testkit.NoError(t, line.Begin(t.Context(), "t", pool.Message{Body: []byte("body")}).Wait())
	for _, e := range log.Events() {
		if e.Kind == fake.Pub && string(e.Bodies[0]) != "body" {
			t.Errorf("the old broker got %q", e.Bodies)
		}
	}
}
