package mqtt_test

import (
	"bytes"
	"cmp"
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

// fixture is a server with a record of its calls.
type fixture struct {
	*mqtt.Server
	t       *testing.T
	log     bytes.Buffer
	metrics *prometheus.Registry
	rules   string

	mu struct { // goroutines of the server write
		sync.Mutex
		wills   []string
		hold    chan struct{} // wills, claims and deletions wait until hold is closed; nil: nothing waits
		claimed []string
		deleted []string
		failure error // of the next claims and deletions
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
			return f.record(&f.mu.wills, id+" "+string(w.Body), nil)
		},
		ClaimChannel: func(_ context.Context, topic, channel string) error {
			return f.record(&f.mu.claimed, topic+" "+channel, &f.mu.failure)
		},
		DeleteChannel: func(_ context.Context, topic, channel string, used bool) error {
			return f.record(&f.mu.deleted, fmt.Sprintf("%s %s %v", topic, channel, used), &f.mu.failure)
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

// record records a call of the server, which may have to wait. It returns the failure.
func (f *fixture) record(calls *[]string, call string, failure *error) error {
	f.mu.Lock()
	hold := f.mu.hold
	*calls = append(*calls, call)
	f.mu.Unlock()
	if hold != nil {
		<-hold
	}
	if failure == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return *failure
}

// count waits until a list does not grow, and returns its length.
func (f *fixture) count(calls *[]string) int {
	clock.Sleep(f.t.Context(), time.Second) // of the bubble's clock
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(*calls)
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
func (connection) Relay(string, string, bool, mono.Time, func()) (mqtt.Subscription, mqtt.Others, error) {
	return nil, nil, nil
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

// connect connects a client, "sensor" unless in says otherwise.
func (f *fixture) connect(in nsq.Connect) (c *mqtt.Client, present bool) {
	f.t.Helper()
	in.ClientID = cmp.Or(in.ClientID, "sensor")
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

// fail sets the error of the next claims and deletions.
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

// The control plane may not know yet that a client has left. So the end of a session soon after is repeated. Later
// a channel in use belongs to a session at another broker.
func TestExpirySoonAfterTheClientLeft(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := start(t, "")
		c, _ := f.connect(nsq.Connect{Expiry: time.Second})
		f.subscribe(c)
		c.Close()
		f.fail(mqtt.ErrInUse)
		deletion := "t mqtt.sensor false"
		f.want(time.Second, &f.mu.deleted, deletion)
		f.fail(nil)
		f.want(10*time.Second, &f.mu.deleted, deletion, deletion)

		c, present := f.connect(nsq.Connect{Expiry: time.Minute})
		testkit.Equal(t, present, false)
		f.subscribe(c)
		c.Close()
		f.fail(mqtt.ErrInUse)
		f.want(time.Hour, &f.mu.deleted, deletion, deletion, deletion)
		_, present = f.connect(nsq.Connect{Expiry: time.Minute})
		testkit.Equal(t, present, false)
	})
}

// A kept session claims its channel when it opens the channel, and repeats a failed claim.
func TestKeptSessionClaimsItsChannel(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := start(t, "")
		c, _ := f.connect(nsq.Connect{Expiry: time.Hour})
		others := []nsq.Filter{
			{Filter: "t", Share: "c", Channel: "c", Topics: []string{"t"}},
			{Filter: "u", Channel: "mqtt.sensor#ephemeral", Topics: []string{"u"}},
		}
		testkit.Must(t, c.Run(t.Context(), &nsq.Op{Kind: nsq.OpSubscribe, MQTT: &nsq.Extra{Filters: others}}))
		f.want(0, &f.mu.claimed)
		f.subscribe(c)
		f.subscribe(c)
		f.want(time.Hour, &f.mu.claimed, "t mqtt.sensor")
		c.Close()

		f.fail(errors.New("no control plane"))
		c, present := f.connect(nsq.Connect{Expiry: time.Hour})
		testkit.Equal(t, present, true)
		f.subscribe(c)
		c.Refresh()
		claims := []string{"t mqtt.sensor", "t mqtt.sensor", "t mqtt.sensor"}
		f.want(0, &f.mu.claimed, claims...)
		f.fail(nil)
		testkit.Equal(t, c.Stale(), false)
		f.want(time.Minute, &f.mu.claimed, claims...)
		testkit.Equal(t, c.Stale(), true)
		c.Refresh()
		f.subscribe(c)
		f.want(time.Hour, &f.mu.claimed, append(claims, "t mqtt.sensor")...)
		c.Close()
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

// When many connections end at once, their wills do not take the broker from the other clients.
func TestFewWillsArePublishedAtOnce(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		const clients, most = 100, 16
		f := start(t, "")
		f.mu.hold = make(chan struct{})
		count := func() int { return f.count(&f.mu.wills) }
		connect := func() (all []*mqtt.Client) {
			for i := range clients {
				c, _ := f.connect(nsq.Connect{ClientID: fmt.Sprint("sensor", i), Will: &nsq.Will{Topic: "w"}})
				all = append(all, c)
			}
			return all
		}
		for _, c := range connect() {
			c.Close()
		}
		testkit.Equal(t, count(), most)
		close(f.mu.hold)
		testkit.Equal(t, count(), clients)

		f.mu.hold = make(chan struct{})
		all := connect()
		go f.PublishWills(t.Context())
		testkit.Equal(t, count(), clients+most)
		close(f.mu.hold)
		testkit.Equal(t, count(), 2*clients)
		for _, c := range all {
			c.Close()
		}
	})
}

// When many sessions begin or end at once, their requests do not overflow the queue to the control plane.
func TestFewRequestsToTheControlPlaneAtOnce(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		const sessions, most = 200, 64
		f := start(t, "")
		f.mu.hold = make(chan struct{})
		var clients []*mqtt.Client
		for i := range sessions {
			c, _ := f.connect(nsq.Connect{ClientID: fmt.Sprint("sensor", i), Expiry: time.Hour})
			clients = append(clients, c)
			go f.subscribe(c)
		}
		testkit.Equal(t, f.count(&f.mu.claimed), most)
		close(f.mu.hold)
		testkit.Equal(t, f.count(&f.mu.claimed), sessions)

		f.mu.hold = make(chan struct{})
		for _, c := range clients {
			c.Close()
		}
		clock.Sleep(t.Context(), time.Hour) // of the bubble's clock
		testkit.Equal(t, f.count(&f.mu.deleted), most)
		close(f.mu.hold)
		testkit.Equal(t, f.count(&f.mu.deleted), sessions)
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
