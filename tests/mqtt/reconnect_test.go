package mqtt

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/mqtt/packet"
)

// subscriber is a device with a kept session and one subscription.
type subscriber struct {
	id, topic  string
	conn       net.Conn
	in         []byte
	present    bool // the broker had a session
	subscribed bool
}

// packet returns the next packet.
func (s *subscriber) packet() (kind packet.Kind, body []byte, err error) {
	buf := make([]byte, 512)
	for {
		kind, body, n, err := packet.Parse(s.in, 1<<16)
		if n > 0 || err != nil {
			s.in = s.in[n:]
			return kind, body, err
		}
		if n, err = s.conn.Read(buf); err != nil {
			return 0, nil, fmt.Errorf("%s: %w", s.id, err)
		}
		s.in = append(s.in, buf[:n]...)
	}
}

// connect connects and subscribes.
func (s *subscriber) connect(address string) (err error) {
	if s.conn, err = net.Dial("tcp", address); err != nil {
		return err
	}
	s.in, s.subscribed = nil, false
	if err := s.conn.SetDeadline(time.Now().Add(testkit.Hang)); err != nil {
		return err
	}
	out := packet.AppendConnect(nil, packet.Hello{Version: packet.V5, ClientID: s.id, Resume: true, Expiry: 3600})
	if _, err := s.conn.Write(packet.AppendSubscribe(out, packet.V5, 1, s.topic)); err != nil {
		return err
	}
	kind, body, err := s.packet()
	if err != nil {
		return err
	}
	ending, err := packet.ParseConnack(packet.V5, body)
	if err != nil || kind != packet.Connack || ending.Reason != 0 {
		return fmt.Errorf("%s: %v with reason %#x, %w", s.id, kind, ending.Reason, err)
	}
	s.present = body[0] == 1
	return nil
}

// receive waits for the messages and acknowledges them. The SUBACK may come before or after the messages.
func (s *subscriber) receive(want ...string) error {
	missing := map[string]bool{}
	for _, m := range want {
		missing[m] = true
	}
	for len(missing) > 0 || !s.subscribed {
		kind, body, err := s.packet()
		if err != nil {
			return fmt.Errorf("%w; missing %v", err, missing)
		}
		switch kind & 0xF0 {
		case packet.Suback & 0xF0:
			if s.subscribed = body[len(body)-1] == 1; !s.subscribed {
				return fmt.Errorf("%s: SUBACK % x", s.id, body)
			}
		case packet.Publish:
			_, payload, id, err := packet.ParseDelivery(packet.V5, body)
			if err != nil {
				return err
			}
			delete(missing, string(payload))
			if _, err := s.conn.Write(packet.AppendPuback(nil, id)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Thousands of devices with kept sessions lose their broker and connect to the other broker at once. Each gets
// the messages that came meanwhile. The sessions at the first broker end later, and leave the channels to the
// sessions at the second broker. SRTM_DEVICES is the number of devices.
func TestManySessionsReconnectToAnotherBroker(t *testing.T) {
	devices, err := strconv.Atoi(cmp.Or(os.Getenv("SRTM_DEVICES"), "1000"))
	testkit.Must(t, err)
	maxBytes := float64(100<<20 + devices*150<<10) // a relayed subscription has two buffers and three goroutines
	ports := localtest.Ports(t, 2)
	c := localtest.Start(t, 0, nil)
	flags := func(i int) []string {
		return []string{"--mcap=100000", "--mqtt-address=" + ports[i], "--max-connections=40000", "--data-path=" + t.TempDir()}
	}
	first := flags(0)
	c.Join(t, first...)
	c.Join(t, flags(1)...)
	// Each broker has a topic. So half of the subscriptions at a broker are local, and half are relayed.
	topics := []string{"east", "west"}
	for _, topic := range topics {
		testkit.Result(localtest.CreateTopic(t.Context(), localtest.Dial(t, c.RPC), &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
			Name: topic, Contract: &srtmv1.Contract{RateMilli: 60_000_000, Burst: 100, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)}},
		}})).Must(t)
	}
	all := make([]*subscriber, devices)
	for i := range all {
		all[i] = &subscriber{id: fmt.Sprint("device-", i), topic: topics[i%len(topics)]}
	}
	each := func(what string, some []*subscriber, do func(*subscriber) error) {
		t.Helper()
		start := time.Now()
		var running sync.WaitGroup
		for _, s := range some {
			running.Go(func() { testkit.NoError(t, do(s), what) })
		}
		running.Wait()
		if t.Failed() {
			t.FailNow()
		}
		for i, b := range c.Brokers {
			bytes := metric(t, b, "process_resident_memory_bytes")
			t.Logf("%s, after %v: b%d has %.0f MB, %.0f sessions", what, time.Since(start).Round(time.Millisecond), i+1, bytes/1e6, metric(t, b, "srtm_nsqd_mqtt_sessions"))
			if bytes > maxBytes {
				t.Errorf("%s: b%d has %.0f bytes, more than %.0f", what, i+1, bytes, maxBytes)
			}
		}
	}
	connectTo := func(address string, present bool) func(*subscriber) error {
		return func(s *subscriber) error {
			err := s.connect(address)
			if err == nil && s.present != present {
				err = fmt.Errorf("%s at %s: session present %v", s.id, address, s.present)
			}
			return err
		}
	}
	receive := func(messages ...string) func(*subscriber) error {
		return func(s *subscriber) error { return s.receive(messages...) }
	}
	end := func(s *subscriber) error { return s.conn.Close() }
	defer each("the end", all, end)
	publisher := connect(t, ports[1], "publisher")
	publish := func(text string) {
		t.Helper()
		for _, topic := range topics {
			testkit.Equal(t, publisher.publish(topic, text, 1), 0)
		}
	}
	each("first connections", all, connectTo(ports[0], false))
	publish("one")
	each("first message", all, receive("one"))
	each("ends", all, end)
	publish("two")
	each("reconnections", all, connectTo(ports[1], false))
	each("message of the meantime", all, receive("two"))

	// The first broker restarts with a shorter expiry. Half of the devices are connected then.
	gone := all[:devices/2]
	each("ends of half of the devices", gone, end)
	testkit.Must(t, c.Brokers[0].Signal(syscall.SIGTERM))
	<-c.Brokers[0].Done()
	c.Brokers[0] = localtest.NSQD(t, "", append(first, "--loaddistributor-address="+c.RPC, "--broker-id=b1", "--mqtt-max-session-expiry=1s")...)
	testkit.WaitFor(t, "the end of the sessions at the first broker", func() bool { return metric(t, c.Brokers[0], "srtm_nsqd_mqtt_sessions") == 0 })
	publish("three")
	each("reconnections of half of the devices", gone, connectTo(ports[1], true))
	each("last message", all, receive("three"))
}

func metric(t *testing.T, p *local.Process, name string) float64 {
	t.Helper()
	return testkit.Result(localtest.Metric(p, name)).Must(t)
}
