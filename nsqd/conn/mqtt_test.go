package conn_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/mqtt/packet"
	"github.com/srtm-io/srtm/mqtt/session"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/auth"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/mqtt"
	"github.com/srtm-io/srtm/tokenbucket"
)

// device speaks MQTT packet by packet.
type device struct {
	nc      net.Conn
	version byte
	in      []byte
	connack packet.Ending
}

// startMQTT starts a node with a listener for MQTT. dial connects a device. A device whose id begins with
// "follower" follows server references.
func startMQTT(change func(*broker.Config, *session.Config), more ...func(*conn.Config)) (n *node, dial func(version byte, id string) *device) {
	GinkgoHelper()
	config := mqttConfig()
	n = start(func(b *broker.Config, c *conn.Config) {
		change(b, &config.Session)
		server, err := mqtt.New(config, prometheus.NewRegistry())
		Expect(err).NotTo(HaveOccurred())
		c.MQTT = server
		for _, set := range more {
			set(c)
		}
	})
	ctx, cancel := context.WithCancel(context.Background())
	ln, err := n.server.Listen(ctx, "127.0.0.1:0")
	Expect(err).NotTo(HaveOccurred())
	served := make(chan error, 1)
	go func() { served <- n.server.ServeProtocol(ctx, ln, conn.MQTT) }()
	DeferCleanup(func() {
		cancel()
		Eventually(served).Should(Receive(BeNil()))
	})
	return n, func(version byte, id string) *device {
		GinkgoHelper()
		nc, err := net.Dial("tcp", ln.Addr().String())
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(nc.Close)
		Expect(nc.SetDeadline(time.Now().Add(testkit.Hang))).To(Succeed())
		d := &device{nc: nc, version: version}
		hello := packet.Hello{Version: version, ClientID: id, Redirect: strings.HasPrefix(id, "follower")}
		d.send(withPassword(packet.AppendConnect(nil, hello), id, id+"'s password"))
		d.connack, err = packet.ParseConnack(version, d.packet(packet.Connack))
		Expect(err).NotTo(HaveOccurred())
		return d
	}
}

func mqttConfig() mqtt.Config {
	GinkgoHelper()
	return mqtt.Config{
		Session: session.DefaultConfig(), Folder: GinkgoT().TempDir(), Log: slog.New(slog.NewTextHandler(GinkgoWriter, nil)),
		Publish:       func(context.Context, string, string, *nsq.Will) error { return nil },
		DeleteChannel: func(context.Context, string, string, bool) error { return nil },
		ClaimChannel:  func(context.Context, string, string) error { return nil },
	}
}

// withPassword adds a user name and a password to a short CONNECT without a will.
func withPassword(connect []byte, user, password string) []byte {
	const size, flags = 1, 9 // offsets
	connect[flags] |= 0xC0
	for _, text := range []string{user, password} {
		connect = append(connect, 0, byte(len(text)))
		connect = append(connect, text...)
	}
	connect[size] = byte(len(connect) - 2)
	return connect
}

func (d *device) send(b []byte) {
	GinkgoHelper()
	_, err := d.nc.Write(b)
	Expect(err).NotTo(HaveOccurred())
}

// packet returns the body of the next packet, which must be of that kind.
func (d *device) packet(want packet.Kind) []byte {
	GinkgoHelper()
	for {
		kind, body, n, err := packet.Parse(d.in, 1<<20)
		Expect(err).NotTo(HaveOccurred())
		if n > 0 {
			body = append([]byte(nil), body...)
			d.in = append([]byte(nil), d.in[n:]...)
			Expect(kind&0xF0).To(Equal(want&0xF0), "the kind of a packet")
			return body
		}
		buf := make([]byte, 4096)
		n, err = d.nc.Read(buf)
		Expect(err).NotTo(HaveOccurred())
		d.in = append(d.in, buf[:n]...)
	}
}

func (d *device) publish(topic string, id uint16, body string) {
	GinkgoHelper()
	d.send(packet.AppendPublish(nil, d.version, topic, id, []byte(body)))
}

// acknowledged waits for a PUBACK.
func (d *device) acknowledged(id uint16, reason byte) {
	GinkgoHelper()
	got, code, err := packet.ParsePuback(d.packet(packet.Puback))
	Expect(err).NotTo(HaveOccurred())
	Expect([]any{got, code}).To(Equal([]any{id, reason}))
}

// referredTo waits for the end of the connection, with the address of another broker.
func (d *device) referredTo(address string) {
	GinkgoHelper()
	ending, err := packet.ParseDisconnect(d.packet(packet.Disconnect))
	Expect(err).NotTo(HaveOccurred())
	Expect(ending).To(And(HaveField("Reason", byte(session.UseAnotherServer)), HaveField("Reference", address)))
	_, err = io.Copy(io.Discard, d.nc)
	Expect(err).NotTo(HaveOccurred())
}

var _ = overBoth("MQTT", func() {
	DescribeTable("refuses a message whose envelope is larger than a message may be", func(fsync, followed bool) {
		const most = 500
		var st *broker.Storage
		if fsync {
			path := GinkgoT().TempDir()
			var err error
			st, err = broker.OpenStorage(broker.StorageConfig{Path: path, Metadata: filepath.Join(path, "topics.json"), MaxRecord: 1 << 20, Overflow: 20, WriteThrough: true, Fsync: true, Log: slog.New(slog.NewTextHandler(GinkgoWriter, nil))})
			Expect(err).NotTo(HaveOccurred())
			DeferCleanup(st.Close)
		}
		n, dial := startMQTT(func(b *broker.Config, _ *session.Config) { b.Storage = st }, func(c *conn.Config) {
			config := mqttConfig()
			config.RulesFile = filepath.Join(GinkgoT().TempDir(), "rules.toml")
			Expect(os.WriteFile(config.RulesFile, []byte("[[mqtt]]\nfilter = \"#\"\ntopic = \"t\"\nenvelope = \"cloudevents\"\n"), 0o600)).To(Succeed())
			var err error
			c.MQTT, err = mqtt.New(config, prometheus.NewRegistry())
			Expect(err).NotTo(HaveOccurred())
			c.Session.Limits.MaxMessageSize = most
		})
		d := dial(5, "d")
		d.publish("a", 1, "small") // from now on the connection knows the topic
		d.acknowledged(1, 0)
		out := packet.AppendPublish(nil, 5, "a", 2, bytes.Repeat([]byte{0xff}, most)) // in Base64, longer
		if followed {
			out = packet.AppendPublish(out, 5, "a", 3, []byte("small"))
		}
		d.send(out)
		d.acknowledged(2, 0x80)
		messages := uint64(1)
		if followed {
			d.acknowledged(3, 0)
			messages++
		}
		topic, err := n.broker.Topic([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		Expect(topic.Stats().Counters.Accepted).To(Equal(messages))
	},
		Entry("alone", false, false),
		Entry("with another message behind it", false, true),
		Entry("alone, to stable storage", true, false),
		Entry("with another message behind it, to stable storage", true, true),
	)

	It("refuses a publish to a full topic with 0x97, and repeats a publish of 3.1.1 until the message fits", func() {
		n, dial := startMQTT(func(b *broker.Config, _ *session.Config) { b.Capacity = 1 })
		five, three := dial(5, "five"), dial(4, "three")
		five.publish("t", 1, "first")
		five.acknowledged(1, 0)
		five.publish("t", 2, "second")
		five.acknowledged(2, 0x97)
		three.publish("t", 1, "third")
		three.publish("t", 2, "fourth")
		five.publish("t", 3, "the topic is still full")
		five.acknowledged(3, 0x97)

		p := n.dial()
		p.send(wire.AppendSub(nil, "t", "c"))
		p.expect(wire.FrameResponse, "OK")
		p.send(wire.AppendRdy(nil, 1))
		for _, want := range []string{"first", "third", "fourth"} {
			m := p.message()
			Expect(string(m.Body)).To(Equal(want))
			p.send(wire.AppendFin(nil, m.ID))
		}
		three.acknowledged(1, 0)
		three.acknowledged(2, 0)
	})

	It("ends a connection whose publish is repeated", func() {
		n, dial := startMQTT(func(b *broker.Config, _ *session.Config) { b.Capacity = 1 })
		d := dial(4, "patient")
		d.publish("t", 1, "first")
		d.acknowledged(1, 0)
		d.publish("t", 2, "second")
		Eventually(func() uint64 { return n.server.Stats().Accepted }).Should(BeEquivalentTo(1))
		n.server.StopReading()
		_, err := io.Copy(io.Discard, d.nc)
		Expect(err).NotTo(HaveOccurred())
	})

	It("sends at most Receive Maximum messages of all topics, and the rest after each PUBACK", func() {
		n, dial := startMQTT(func(_ *broker.Config, c *session.Config) { c.MaxInflight = 2 })
		d, p := dial(5, "subscriber"), dial(5, "publisher")
		topics := []string{"a", "b", "c"}
		for i, topic := range topics {
			d.send(packet.AppendSubscribe(nil, 5, uint16(i+1), topic))
			d.packet(packet.Suback)
		}
		want := map[string]int{}
		for i := range 12 {
			topic := topics[i%3]
			p.publish(topic, uint16(i+1), topic)
			p.acknowledged(uint16(i+1), 0)
			want[topic]++
		}
		var held []uint16
		got := map[string]int{}
		for range 12 {
			topic, payload, id, err := packet.ParseDelivery(5, d.packet(packet.Publish))
			Expect(err).NotTo(HaveOccurred())
			Expect(string(payload)).To(Equal(string(topic)))
			got[string(topic)]++
			if held = append(held, id); len(held) == 2 {
				d.send(packet.AppendPuback(packet.AppendPuback(nil, held[0]), held[1]))
				held = nil
			}
		}
		Expect(got).To(Equal(want))
		Eventually(func() (left int) {
			for _, topic := range n.broker.Topics() {
				for _, c := range topic.Stats().Channels {
					left += c.InFlight + c.Ready
				}
			}
			return left
		}).Should(BeZero())
	})

	It("names the protocol of a client", func() {
		n, dial := startMQTT(func(*broker.Config, *session.Config) {})
		dial(4, "old")
		dial(5, "new")
		protocols := map[string]string{}
		for _, c := range n.server.Clients() {
			protocols[c.ClientID] = c.Protocol
		}
		Expect(protocols).To(Equal(map[string]string{"old": "mqtt3.1.1", "new": "mqtt5"}))
	})

	It("forwards for publishers that have moved, and sends followers to the other broker", func() {
		placement, err := fake.NewPlacement()
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(placement.Close)
		f := startForwarder(placement)
		forwards := func(c *conn.Config) { c.Forward, c.Session.Forwarded = f, true }
		n, dial := startMQTT(func(*broker.Config, *session.Config) {}, forwards)
		elsewhere := start(func(_ *broker.Config, c *conn.Config) { forwards(c) })
		placement.ServeMQTT(elsewhere.address, "elsewhere.example:1883")
		f.SetBroker("b-"+n.address, n.address)
		ids := map[string]bool{"old": true, "stays": true, "follower": true}
		place := func(address string) { placement.Place("t", address, slices.Collect(maps.Keys(ids))...) }
		place(n.address)
		placement.Place("t", elsewhere.address, "follower 2")
		old, stays, follower, other := dial(4, "old"), dial(5, "stays"), dial(5, "follower"), dial(5, "other")
		all := []*device{old, stays, follower, other}
		for _, d := range all {
			d.publish("t", 1, "before")
			d.acknowledged(1, 0)
		}
		accepted := func(at *node) uint64 {
			topic, err := at.broker.Topic([]byte("t"))
			Expect(err).NotTo(HaveOccurred())
			return topic.Stats().Counters.Accepted
		}
		Expect(accepted(n)).To(BeEquivalentTo(4))

		// A follower whose publisher belongs to another broker learns so after its first publish.
		late := dial(5, "follower 2")
		late.publish("t", 1, "stored here")
		late.acknowledged(1, 0)
		late.referredTo("elsewhere.example:1883")
		Expect(accepted(n)).To(BeEquivalentTo(5))

		place(elsewhere.address)
		Expect(n.server.DrainPublishers("t", ids)).To(Equal(3))
		follower.referredTo("elsewhere.example:1883")
		for _, d := range []*device{old, stays, other} {
			d.publish("t", 2, "after")
			d.acknowledged(2, 0)
		}
		Expect(accepted(n)).To(BeEquivalentTo(6), "of the device that has not moved")
		Expect(accepted(elsewhere)).To(BeEquivalentTo(2))

		// A follower is not sent back and forth.
		follower = dial(5, "follower")
		follower.publish("t", 1, "here again")
		follower.acknowledged(1, 0)

		// A publisher that has moved back publishes here again, without another connection.
		place(n.address)
		returned := func() (count uint64) { // publishes that this broker has forwarded to itself
			for _, c := range n.server.Clients() {
				for _, p := range c.Published {
					if c.Origin != nil {
						count += p.Count
					}
				}
			}
			return count
		}
		Eventually(func() bool {
			here, forwarded := accepted(n), returned()
			stays.publish("t", 3, "back")
			stays.acknowledged(3, 0)
			return accepted(n) == here+1 && returned() == forwarded
		}).Should(BeTrue())
	})

	It("redirects a publisher that must move if the broker does not forward, and lets others publish", func() {
		n, dial := startMQTT(func(*broker.Config, *session.Config) {})
		moved, old, other := dial(5, "moved"), dial(4, "old"), dial(5, "other")
		for _, d := range []*device{moved, old, other} {
			d.publish("t", 1, "x")
			d.acknowledged(1, 0)
		}
		Expect(n.server.DrainPublishers("t", map[string]bool{"moved": true, "old": true})).To(Equal(2))
		body := moved.packet(packet.Disconnect)
		Expect(body[0]).To(BeEquivalentTo(session.UseAnotherServer))
		Expect(string(body)).To(ContainSubstring(`publishers of topic "t" have moved to another broker; connect again`))
		for _, d := range []*device{moved, old} {
			_, err := io.Copy(io.Discard, d.nc)
			Expect(err).NotTo(HaveOccurred(), "the end of the connection")
		}
		other.publish("t", 2, "still here")
		other.acknowledged(2, 0)
		again := dial(5, "moved")
		again.publish("t", 1, "x")
		again.acknowledged(1, 0)
	})

	It("queries the auth server with the client's password, and refuses and permits by the answer", func() {
		p := new(authServer)
		_, dial := startMQTT(func(*broker.Config, *session.Config) {}, func(c *conn.Config) { c.Auth, c.Session.AuthRequired = p, true })
		for _, refused := range []struct {
			prepare func()
			reason  session.Reason
		}{
			{func() { p.fails(errors.New("no server answers")) }, session.ServerUnavailable},
			{func() { p.fails(fmt.Errorf("auth server a: %w", auth.ErrRefused)) }, session.BadUserOrPassword},
			{func() { p.answers(`{"ttl":3600,"identity":"me","authorizations":[]}`) }, session.NotAuthorized},
		} {
			refused.prepare()
			d := dial(5, "sensor")
			Expect(d.connack.Reason).To(BeEquivalentTo(refused.reason))
			_, err := io.Copy(io.Discard, d.nc)
			Expect(err).NotTo(HaveOccurred(), "the end of the connection")
		}
		p.fails(auth.ErrRefused)
		Expect(dial(4, "sensor").connack.Reason).To(BeEquivalentTo(4), "bad user name or password")
		p.permits(`"publish"`, "allowed", ".*")
		d := dial(5, "sensor")
		Expect(d.connack.Reason).To(BeZero())
		Expect(p.asked()).To(HaveEach(HaveField("Secret", "sensor's password")))
		d.publish("allowed", 1, "x")
		d.acknowledged(1, 0)
		d.publish("forbidden", 2, "x")
		d.acknowledged(2, byte(session.NotAuthorized))
		d.send(packet.AppendSubscribe(nil, 5, 3, "allowed"))
		suback := d.packet(packet.Suback)
		Expect(suback[len(suback)-1]).To(BeEquivalentTo(session.NotAuthorized))
	})

	It("spends the tokens of one contract on publishers of MQTT and of NSQ", func() {
		n, dial := startMQTT(func(*broker.Config, *session.Config) {})
		node := n.broker.Node()
		Expect(node.Prepare("t", nil, 1, time.Millisecond, 0.99, srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT, nil)).Error().NotTo(HaveOccurred())
		share := tokenbucket.Share{Rate: tokenbucket.PerSecond(0.001), Burst: 3}
		Expect(node.Grant("t", share, share, mono.Never, mono.Never, 3*tokenbucket.Token)).Error().NotTo(HaveOccurred())
		d, p := dial(5, "device"), n.dial()
		p.send(wire.AppendPub(nil, "t", []byte("one")))
		p.expect(wire.FrameResponse, "OK")
		d.publish("t", 1, "two")
		d.acknowledged(1, 0)
		p.send(wire.AppendPub(nil, "t", []byte("three")))
		p.expect(wire.FrameResponse, "OK")
		d.publish("t", 2, "over the limit")
		d.acknowledged(2, byte(session.QuotaExceeded))
		p.send(wire.AppendPub(nil, "t", []byte("over the limit")))
		kind, text := p.frame()
		Expect(kind).To(Equal(wire.FrameError))
		Expect(text).To(HavePrefix("E_RATE_LIMITED"))
	})
})
