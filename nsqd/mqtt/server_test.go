package mqtt_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	prometheustest "github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/mqtt/packet"
	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/mqtt"
	"github.com/srtm-io/srtm/pacing/police"
)

// fixture is a server, and what it did.
type fixture struct {
	*mqtt.Server
	t       *testing.T
	log     bytes.Buffer
	metrics *prometheus.Registry
	rules   string

	mu struct { // goroutines of the server write
		sync.Mutex
		wills   []string
		deleted []string
		failure error // of the next deletions
	}
}

// start starts a server with the text of the rules file.
func start(t *testing.T, rules string) *fixture {
	t.Helper()
	f := &fixture{t: t, metrics: prometheus.NewRegistry(), rules: filepath.Join(t.TempDir(), "rules.toml")}
	f.write(rules)
	hideTime := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}
	server, err := mqtt.New(mqtt.Config{
		Session: session.DefaultConfig(), RulesFile: f.rules, Folder: filepath.Join(t.TempDir(), "mqtt"),
		Log: slog.New(slog.NewTextHandler(&f.log, &slog.HandlerOptions{ReplaceAttr: hideTime})),
		Publish: func(_ context.Context, id, _ string, w *nsq.Will) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.mu.wills = append(f.mu.wills, id+" "+string(w.Body))
			return nil
		},
		DeleteChannel: func(_ context.Context, topic, channel string, used bool) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.mu.deleted = append(f.mu.deleted, fmt.Sprintf("%s %s %v", topic, channel, used))
			return f.mu.failure
		},
	}, f.metrics)
	testkit.Must(t, err)
	f.Server = server
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- server.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		testkit.Must(t, <-ended)
		server.Close()
	})
	return f
}

func (f *fixture) write(rules string) {
	f.t.Helper()
	testkit.Must(f.t, os.WriteFile(f.rules, []byte(rules), 0o600))
}

// connection is a connection whose broker takes every subscription.
type connection struct{ mqtt.Connection }

func (connection) Authenticate(string) error { return nil }
func (connection) Permit(string) error       { return nil }
func (connection) Identity() police.Identity { return police.Identity{} }
func (connection) Notify()                   {}
func (connection) Subscribe(string, string, func()) (mqtt.Subscription, error) {
	return subscription{}, nil
}

// subscription has no messages.
type subscription struct{}

func (subscription) Ready(int) error                                                 { return nil }
func (subscription) Take(*broker.Outgoing, int) bool                                 { return true }
func (subscription) Wrote(*broker.Outgoing)                                          {}
func (subscription) FinishBatch(mono.Time, []wire.MessageID, []error) (errs []error) { return nil }
func (subscription) Requeue(wire.MessageID, time.Duration) error                     { return nil }
func (subscription) Holds() (ready, inFlight int)                                    { return 0, 0 }
func (subscription) Close()                                                          {}

// connect connects the client "sensor".
func (f *fixture) connect(in nsq.Connect) (c *mqtt.Client, present bool) {
	f.t.Helper()
	in.ClientID, in.Version = "sensor", packet.V5
	c = f.NewClient(connection{}, false, clock.Mono())
	testkit.Must(f.t, c.Run(f.t.Context(), &nsq.Op{Kind: nsq.OpConnect, MQTT: &nsq.Extra{Connect: &in}}))
	return c, in.Present
}

// subscribe subscribes to topic t with the client's own channel.
func (f *fixture) subscribe(c *mqtt.Client) {
	f.t.Helper()
	filters := []nsq.Filter{{Filter: "t", Channel: "mqtt.sensor", Topics: []string{"t"}, QoS: 1}}
	testkit.Must(f.t, c.Run(f.t.Context(), &nsq.Op{Kind: nsq.OpSubscribe, MQTT: &nsq.Extra{Filters: filters}}))
}

// want waits until virtual time has passed, and compares a list.
func (f *fixture) want(after time.Duration, got *[]string, want ...string) {
	f.t.Helper()
	clock.Sleep(f.t.Context(), after) // of the bubble's clock
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	testkit.EqualSlices(f.t, *got, want)
}

// fail sets the error of the next deletions.
func (f *fixture) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.failure = err
}

func TestExpiryDeletesTheChannelsOfASession(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := start(t, "")
		c, present := f.connect(nsq.Connect{Expiry: time.Hour})
		testkit.Equal(t, present, false)
		f.subscribe(c)
		c.Close()
		f.want(59*time.Minute, &f.mu.deleted)
		c, present = f.connect(nsq.Connect{Expiry: time.Hour})
		testkit.Equal(t, present, true)
		f.want(2*time.Hour, &f.mu.deleted)
		c.Close()
		f.fail(errors.New("no control plane"))
		f.want(time.Hour, &f.mu.deleted, "t mqtt.sensor false")
		f.fail(nil)
		f.want(10*time.Minute, &f.mu.deleted, "t mqtt.sensor false", "t mqtt.sensor false")
		_, present = f.connect(nsq.Connect{Expiry: time.Hour})
		testkit.Equal(t, present, false)
	})
}

// A clean start also ends a session whose channel has a consumer: the client's session at another broker.
func TestCleanStartDeletesUsedChannels(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := start(t, "")
		c, _ := f.connect(nsq.Connect{Expiry: time.Hour})
		f.subscribe(c)
		c.Close()
		c, present := f.connect(nsq.Connect{Expiry: time.Hour, CleanStart: true})
		testkit.Equal(t, present, false)
		f.want(0, &f.mu.deleted, "t mqtt.sensor true")
		c.Close()
	})
}

func TestWillWaitsForItsDelay(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := start(t, "")
		will := func(delay time.Duration) nsq.Connect {
			return nsq.Connect{Expiry: time.Hour, Will: &nsq.Will{Topic: "w", Body: fmt.Append(nil, "after ", delay), Delay: delay}}
		}
		c, _ := f.connect(will(time.Minute))
		c.Close()
		f.want(59*time.Second, &f.mu.wills)
		c, _ = f.connect(will(2 * time.Minute)) // in time: the first will is dropped
		f.want(time.Hour, &f.mu.wills)
		c.Close()
		f.want(2*time.Minute, &f.mu.wills, "sensor after 2m0s")
		c, _ = f.connect(will(3 * time.Hour)) // the session ends earlier
		c.Close()
		f.want(time.Hour, &f.mu.wills, "sensor after 2m0s", "sensor after 3h0m0s")
		c, _ = f.connect(will(time.Minute))
		testkit.Must(t, c.Run(t.Context(), &nsq.Op{Kind: nsq.OpDisconnect, MQTT: &nsq.Extra{}}))
		c.Close()
		f.want(time.Hour, &f.mu.wills, "sensor after 2m0s", "sensor after 3h0m0s")
	})
}

func TestFaultyRulesChangeNothing(t *testing.T) {
	f := start(t, "[[mqtt]]\nfilter = \"a/b\"\ntopic = \"first\"\n")
	c := f.NewClient(connection{}, false, clock.Mono())
	var op nsq.Op
	step := func(in []byte) {
		t.Helper()
		testkit.MustEqual(t, c.StepInto(in, clock.Mono(), &op), len(in))
		if op.Kind == nsq.OpConnect {
			testkit.Must(t, c.Run(t.Context(), &op))
		}
		c.Answer(&op, nil)
	}
	step(packet.AppendConnect(nil, packet.Hello{Version: packet.V5, ClientID: "sensor"}))
	want := func(topic string) {
		t.Helper()
		step(packet.AppendPublish(nil, packet.V5, "a/b", 1, []byte("x")))
		testkit.Equal(t, string(op.Topic), topic)
	}
	want("first")
	f.write("[[mqtt]]\nfilter = \"a/b\"\ntopic = \"not a topic\"\n")
	f.Reload()
	testkit.Equal(t, f.log.String(), `level=ERROR msg="the MQTT rules are not changed" error="`+f.rules+`: rule 1 (filter \"a/b\"): topic \"not a topic\" is not a valid SRTM topic name"`+"\n")
	want("first")
	f.log.Reset()
	testkit.Must(t, os.Remove(f.rules))
	f.Reload()
	testkit.Equal(t, f.log.String(), `level=ERROR msg="the MQTT rules are not changed" error="open `+f.rules+`: no such file or directory"`+"\n")
	want("first")
	f.log.Reset()
	f.write("[[mqtt]]\nfilter = \"a/b\"\ntopic = \"second\"\n")
	f.Reload()
	testkit.Equal(t, f.log.String(), "level=INFO msg=\"the MQTT rules are read again\" file="+f.rules+"\n")
	want("second")
	c.Close()
}

func TestRefusedFiltersAreLogged(t *testing.T) {
	f := start(t, "")
	c := f.NewClient(connection{}, false, clock.Mono())
	var op nsq.Op
	for _, in := range [][]byte{
		packet.AppendConnect(nil, packet.Hello{Version: packet.V5, ClientID: "sensor"}),
		packet.AppendSubscribe(nil, packet.V5, 1, "no/rule"),
	} {
		testkit.MustEqual(t, c.StepInto(in, clock.Mono(), &op), len(in))
		testkit.Must(t, c.Run(t.Context(), &op))
		c.Answer(&op, nil)
	}
	testkit.Equal(t, f.log.String(), `level=INFO msg="subscription refused" client_id=sensor reason="filter \"no/rule\": no rule maps names of the filter to a topic, and the filter is no topic name"`+"\n")
	c.Close()
}

func TestIgnoredPartsOfAPublishAreCounted(t *testing.T) {
	f := start(t, "")
	c := f.NewClient(connection{}, false, clock.Mono())
	var op nsq.Op
	step := func(in []byte) {
		t.Helper()
		testkit.MustEqual(t, c.StepInto(in, clock.Mono(), &op), len(in))
		c.Answer(&op, nil)
	}
	step(packet.AppendConnect(nil, packet.Hello{Version: packet.V311, ClientID: "sensor"}))
	publish := packet.AppendPublish(nil, packet.V311, "t", 1, []byte("x"))
	step(publish)
	retained := slices.Clone(publish)
	retained[0] |= 1
	step(retained)
	step(retained)
	testkit.Must(t, prometheustest.GatherAndCompare(f.metrics, bytes.NewBufferString(`# HELP srtm_nsqd_mqtt_ignored_total Publishes of MQTT clients of which nsqd ignored a part: the wish to retain the message, or properties that are too large.
# TYPE srtm_nsqd_mqtt_ignored_total counter
srtm_nsqd_mqtt_ignored_total{part="retain"} 2
`), "srtm_nsqd_mqtt_ignored_total"))
	c.Close()
}
