package cluster

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// spread creates a topic over several brokers of a cluster. spread returns the numbers of these
// brokers, and the number of a broker without the topic.
func spread(t *testing.T, c *localtest.Cluster, name string, rate int64) (homes []int, front int) {
	t.Helper()
	topic := testkit.Result(localtest.CreateTopic(t.Context(), localtest.Dial(t, c.RPC), &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
		Name:     name,
		Contract: &srtmv1.Contract{RateMilli: rate * 1000, Burst: 1000, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)}},
		Channels: []string{"archive"},
	}})).Must(t)
	for _, q := range topic.Quotas {
		homes = append(homes, brokerOf(q.BrokerId))
	}
	for front = 0; slices.Contains(homes, front); front++ {
	}
	testkit.MustEqual(t, front < len(c.Brokers), true, "a broker without the topic")
	return homes, front
}

// subscriber is a raw consumer of a channel.
func subscriber(t *testing.T, address, topic, channel string, ready int) *pipe {
	t.Helper()
	p := newPipe(t, address, "raw")
	p.send(wire.AppendSub(nil, topic, channel))
	p.want("OK")
	p.send(wire.AppendRdy(nil, ready))
	return p
}

// message returns the next message.
func (p *pipe) message() wire.Message {
	p.t.Helper()
	for {
		kind, data, err := frames.Read(p.r, 1<<20)
		testkit.Must(p.t, err)
		if kind == wire.FrameMessage {
			return testkit.Result(wire.ParseMessage(data)).Must(p.t)
		}
		if string(data) != wire.Heartbeat {
			p.t.Fatalf("%v %q in place of a message", kind, data)
		}
	}
}

// A consumer with only one known broker gets the messages of all brokers of the topic, even with RDY
// 1. The consumer finishes, requeues and touches messages at their original brokers.
func TestAnyBrokerTakesAnySubscription(t *testing.T) {
	c := localtest.Start(t, 4, []string{"--fitting=off"}, "--mcap=2000")
	homes, front := spread(t, c, "t", 5000)
	testkit.MustEqual(t, len(homes), 3)
	produce := func(what string) (bodies []string) {
		for _, home := range homes {
			bodies = append(bodies, fmt.Sprintf("%s of b%d", what, home+1))
			testkit.MustEqual(t, localtest.MustAsk(t, http.MethodPost, "http://"+c.Brokers[home].HTTP+"/pub?topic=t", bodies[len(bodies)-1]), "OK")
		}
		return bodies
	}
	received := make(localtest.Bodies, 100)
	stop := localtest.Consume(t, "t", "archive", received, func(cfg *nsq.Config) { cfg.MaxInFlight, cfg.ClientID = 1, "stock" }, c.Brokers[front].TCP)
	for i := range 3 {
		received.Want(t, produce(fmt.Sprint(i))...)
	}
	if n, err := localtest.Metric(c.Brokers[front], "srtm_nsqd_relayed_subscriptions"); err != nil || n != 1 {
		t.Errorf("%v relayed subscriptions, %v", n, err)
	}
	if n, err := localtest.Metric(c.Brokers[front], "srtm_nsqd_relayed_messages_total"); err != nil || n != 9 {
		t.Errorf("%v relayed messages, %v", n, err)
	}
	for _, home := range homes {
		text := localtest.MustAsk(t, http.MethodGet, "http://"+c.Brokers[home].HTTP+"/stats?format=json&topic=t", "")
		if !strings.Contains(text, `"client_id":"stock"`) || !strings.Contains(text, fmt.Sprintf(`"forwarder":"b%d"`, front+1)) {
			t.Errorf("b%d does not know its consumer: %s", home+1, text)
		}
	}
	stop()
	testkit.WaitFor(t, "the end of the relay", func() bool {
		n, err := localtest.Metric(c.Brokers[front], "srtm_nsqd_relay_connections")
		return err == nil && n == 0
	})

	// REQ, TOUCH, FIN and CLS. When a consumer ends, its messages go to another consumer at once.
	want := produce("raw")
	p := subscriber(t, c.Brokers[front].TCP, "t", "archive", 3)
	ids, came := map[wire.MessageID]string{}, []string{}
	for range want {
		m := p.message()
		ids[m.ID], came = string(m.Body), append(came, string(m.Body))
	}
	for id := range ids {
		p.send(fmt.Appendf(nil, "TOUCH %s\nREQ %s 0\n", id, id))
	}
	for range want {
		again := p.message()
		testkit.Equal(t, string(again.Body), ids[again.ID])
		testkit.Equal(t, again.Attempts, 2)
	}
	slices.Sort(came)
	slices.Sort(want)
	testkit.Equal(t, strings.Join(came, ", "), strings.Join(want, ", "))
	first := true
	for id := range ids {
		if first {
			p.send(append(wire.AppendFin(nil, id), wire.AppendFin(nil, id)...))
			if answer := p.answer(); !strings.HasPrefix(answer, "E_FIN_FAILED") {
				t.Errorf("FIN twice: %s", answer)
			}
		}
		first = false
	}
	p.send([]byte("CLS\n"))
	p.want("CLOSE_WAIT")
	produce("after CLS") // p gets none of these
	p.nc.Close()
	q := subscriber(t, c.Brokers[front].TCP, "t", "archive", 10)
	for range 2 + len(want) {
		q.send(wire.AppendFin(nil, q.message().ID))
	}

	// An ephemeral channel, and a paused channel.
	e := subscriber(t, c.Brokers[front].TCP, "t", "short#ephemeral", 10)
	testkit.WaitFor(t, "all brokers", func() bool {
		n, err := localtest.Metric(c.Brokers[front], "srtm_nsqd_relay_connections")
		return err == nil && n == 6
	})
	localtest.MustAsk(t, http.MethodPost, "http://"+c.Brokers[homes[0]].HTTP+"/channel/pause?topic=t&channel=archive", "")
	produce("ephemeral")
	for range homes {
		e.send(wire.AppendFin(nil, e.message().ID))
	}
	localtest.MustAsk(t, http.MethodPost, "http://"+c.Brokers[homes[0]].HTTP+"/channel/unpause?topic=t&channel=archive", "")
	for range homes {
		q.send(wire.AppendFin(nil, q.message().ID))
	}

	// A missing topic is created, and its messages reach the consumer from any broker.
	for i := range 3 { // the brokers have capacity for three
		name := fmt.Sprint("new", i)
		fresh := make(localtest.Bodies, 10)
		localtest.Consume(t, name, "archive", fresh, nil, c.Brokers[front].TCP)
		testkit.Must(t, localtest.Producer(t, c.Brokers[homes[0]].TCP, "stock").Publish(name, []byte("x")))
		fresh.Want(t, "x")
	}
}

// With forwarding off, a broker refuses subscriptions to other brokers' topics.
func TestRelayOffRefusesSubscribers(t *testing.T) {
	c := localtest.Start(t, 2, nil, "--forward=off", "--mcap=100000")
	home := openTopic(t, c, "t")
	p := newPipe(t, c.Brokers[1-home].TCP, "stock")
	p.send(wire.AppendSub(nil, "t", "archive"))
	if answer := p.answer(); !strings.HasPrefix(answer, "E_BAD_TOPIC") {
		t.Error(answer)
	}
}

// A consumer with only one known broker misses no acknowledged message while the topic drains from
// broker to broker, also to and from the consumer's own broker, and while the topic's broker is
// killed.
func TestRelayThroughMovesDrainsAndCrashes(t *testing.T) {
	c := localtest.Start(t, 3, []string{"--evacuate-after=1s", "--report-interval=200ms", "--fitting=off"},
		"--mcap=100000", "--durability=fsync", "--mem-queue-size=100000", "--nudge-consumers-after=0s")
	home := openTopic(t, c, "t")
	front := (home + 1) % 3
	j := &judge{acked: map[uint32][]uint32{}, came: map[uint64][]int64{}}
	localtest.Consume(t, "t", "archive", j, func(cfg *nsq.Config) { cfg.MaxInFlight = 2000 }, c.Brokers[front].TCP)
	ctx, stop := context.WithCancel(t.Context())
	var producers sync.WaitGroup
	defer producers.Wait()
	defer stop()
	for i := range 2 {
		producers.Go(func() { j.produce(ctx, c.Brokers[front].TCP, uint32(i+1), 1+15*i) })
	}
	j.move(t, c, home, front)
	stop()
	producers.Wait()
	testkit.WaitFor(t, "all that was acknowledged", func() bool { return j.missing() == 0 })
	t.Logf("%d messages acknowledged, %d failed", j.acknowledged(), j.failed)
}

// A thousand relayed consumers get their messages. A consumer that reads nothing takes a bounded part
// of the broker's memory and harms no other consumer. All consumers release their memory at the end.
func TestManyRelayedSubscriptions(t *testing.T) {
	c := localtest.Start(t, 2, []string{"--fitting=off"}, "--mcap=100000", "--mem-queue-size=100000", "--max-connections=10000")
	home := openTopic(t, c, "t")
	front := c.Brokers[1-home]
	metric := func(name string) float64 {
		n, err := localtest.Metric(front, name)
		testkit.Must(t, err)
		return n
	}
	const consumers = 1000
	pipes := make([]*pipe, consumers)
	for i := range pipes {
		pipes[i] = subscriber(t, front.TCP, "t", "archive", 1)
	}
	testkit.Equal(t, metric("srtm_nsqd_relayed_subscriptions"), consumers)

	// The stalled consumer has a separate channel, and a backlog of 64 MB.
	stalled := subscriber(t, front.TCP, "t", "stalled", 2000)
	p := localtest.Producer(t, front.TCP, "stock")
	body := []byte(strings.Repeat("x", 64<<10))
	for range 1000 {
		testkit.Must(t, p.Publish("t", body))
	}
	if n := metric("srtm_nsqd_relay_waiting_bytes"); n > 512<<10 {
		t.Errorf("%v bytes wait for a consumer that reads nothing", n)
	}
	for _, one := range pipes {
		one.send(wire.AppendFin(nil, one.message().ID))
	}
	testkit.MustEqual(t, len(stalled.message().Body), len(body), "what the stalled consumer reads at last")
	for _, one := range append(pipes, stalled) {
		one.nc.Close()
	}
	testkit.WaitFor(t, "the end of all relays", func() bool {
		return metric("srtm_nsqd_relayed_subscriptions") == 0 && metric("srtm_nsqd_relay_connections") == 0 && metric("srtm_nsqd_relay_waiting_bytes") == 0
	})
}
