package mqtt_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/mqtt/packet"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/mqtt"
)

// part is a subscription to a part of a topic, or a relay.
type part struct {
	subscription
	notify  func()
	ready   int
	ended   bool
	closed  bool
	brokers int
	here    bool
}

func (p *part) Ready(n int) error               { p.ready = n; return nil }
func (p *part) Take(*broker.Outgoing, int) bool { return !p.ended }
func (p *part) Close()                          { p.closed = true }
func (p *part) Brokers() int                    { return p.brokers }
func (p *part) Here() bool                      { return p.here }

// spread is a connection in a cluster.
type spread struct {
	connection
	local, relayed *part // nil: there is none
	failure        error // of Relay
	calls          []string
}

func (s *spread) Subscribe(_, _ string, notify func()) (mqtt.Subscription, error) {
	s.calls = append(s.calls, "here")
	if s.local == nil {
		return nil, nil
	}
	s.local.notify = notify
	return s.local, nil
}

func (s *spread) Relay(_, _ string, here bool, _ mono.Time, notify func()) (mqtt.Subscription, mqtt.Others, error) {
	s.calls = append(s.calls, map[bool]string{true: "others", false: "all"}[here])
	if s.relayed == nil || s.failure != nil {
		return nil, nil, s.failure
	}
	s.relayed.notify = notify
	return s.relayed, s.relayed, nil
}

// subscriber returns a client that subscribes to topic t.
func (f *fixture) subscriber(s *spread) *mqtt.Client {
	f.t.Helper()
	c := f.NewClient(s, false, clock.Mono())
	var op nsq.Op
	for _, in := range [][]byte{
		packet.AppendConnect(nil, packet.Hello{Version: packet.V5, ClientID: "sensor"}),
		packet.AppendSubscribe(nil, packet.V5, 1, "t"),
	} {
		testkit.MustEqual(f.t, c.StepInto(in, clock.Mono(), &op), len(in))
		testkit.Must(f.t, c.Run(f.t.Context(), &op))
		c.Answer(&op, nil)
	}
	c.Refresh()
	return c
}

func take(t *testing.T, c *mqtt.Client) {
	t.Helper()
	testkit.Equal(t, c.Sources.Take(new(broker.Outgoing), 1<<10), true)
}

// pass waits until virtual time has passed.
func pass(t *testing.T, d time.Duration) {
	clock.Sleep(t.Context(), d) // of the bubble's clock
	synctest.Wait()
}

// The window of a client is divided among the brokers of the topic. Without other brokers this broker has all.
func TestWindowIsDividedAmongTheBrokersOfATopic(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := start(t, "")
		s := &spread{local: &part{}, relayed: &part{}}
		c := f.subscriber(s)
		testkit.EqualSlices(t, s.calls, []string{"here", "others"})
		window := s.local.ready
		testkit.Equal(t, window > 4, true)
		s.relayed.brokers = 3
		s.relayed.notify()
		take(t, c)
		testkit.Equal(t, s.local.ready, window/4)
		testkit.Equal(t, s.relayed.ready, window*3/4)
		s.relayed.brokers = 0
		s.relayed.notify()
		take(t, c)
		testkit.Equal(t, s.local.ready, window)
		c.Close()
		testkit.Equal(t, s.local.closed && s.relayed.closed, true)
	})
}

// A part that comes to this broker is opened. A part that leaves is closed, and the relay stays.
func TestPartsComeAndGo(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := start(t, "")
		s := &spread{relayed: &part{brokers: 1}}
		c := f.subscriber(s)
		testkit.EqualSlices(t, s.calls, []string{"here", "all", "here"})
		testkit.Equal(t, c.Stale(), false)
		s.relayed.here = true
		s.relayed.notify()
		take(t, c)
		testkit.Equal(t, c.Stale(), true)
		s.calls = nil
		c.Refresh() // the part is not ready yet
		testkit.Equal(t, c.Stale(), false)
		s.local = &part{}
		pass(t, time.Second)
		testkit.Equal(t, c.Stale(), true)
		s.calls = nil
		c.Refresh()
		testkit.EqualSlices(t, s.calls, []string{"here"})
		testkit.Equal(t, s.local.ready, s.relayed.ready)

		s.relayed.here = false
		s.relayed.notify()
		gone := s.local
		gone.ended, s.local, s.calls = true, nil, nil
		gone.notify()
		take(t, c)
		testkit.Equal(t, c.Stale(), true)
		c.Refresh()
		testkit.EqualSlices(t, s.calls, []string{"here"})
		testkit.Equal(t, gone.closed, true)
		testkit.Equal(t, s.relayed.closed, false)
		c.Close()
	})
}

// A topic that only this broker knows is relayed later.
func TestUnknownTopicIsRelayedLater(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		f := start(t, "")
		s := &spread{local: &part{}, failure: broker.ErrUnknownTopic}
		c := f.subscriber(s)
		s.failure, s.relayed = nil, &part{brokers: 1}
		pass(t, 4*time.Second)
		testkit.Equal(t, c.Stale(), false)
		pass(t, time.Second)
		testkit.Equal(t, c.Stale(), true)
		c.Refresh()
		testkit.Equal(t, s.relayed.ready, s.local.ready)
		c.Close()
	})
}
