package conn_test

import (
	"context"
	"encoding/binary"
	"log/slog"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/nsq/origin"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/forward"
	"github.com/srtm-io/srtm/pacing/police"
)

// listing encodes a delivery as a line of text: attribute, '=', body.
type listing struct{}

func (listing) AppendMessage(dst []byte, m *wire.Message, attribute []byte) []byte {
	return append(append(append(append(dst, attribute...), '='), m.Body...), '\n')
}

// bodies is a batch.
type bodies []string

func (b bodies) Len() int   { return len(b) }
func (b bodies) Bytes() int { return len(strings.Join(b, "")) }
func (b bodies) Each(f func([]byte)) {
	for _, body := range b {
		f([]byte(body))
	}
}

// startForwarder runs a forwarder until the test ends.
func startForwarder(placement *fake.Placement) *forward.Forwarder {
	GinkgoHelper()
	f, err := forward.New(forward.Config{LoadDistributor: placement.Address(), MaxConnections: 100, MaxBytes: 1 << 20, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	Expect(err).NotTo(HaveOccurred())
	f.SetKey([]byte("the key"))
	ctx, stop := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- f.Run(ctx) }()
	DeferCleanup(func() {
		stop()
		Eventually(ran).Should(Receive(BeNil()))
	})
	return f
}

var _ = overBoth("between brokers, an attribute", func() {
	var (
		n *node
		f *forward.Forwarder
	)

	BeforeEach(func() {
		placement, err := fake.NewPlacement()
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(placement.Close)
		f = startForwarder(placement)
		f.SetBroker("front", "")
		n = start(func(_ *broker.Config, c *conn.Config) {
			c.Forward, c.Session.Forwarded, c.Session.Limits.MaxMessageSize, c.Session.Limits.MaxBodySize = f, true, 1000, 3000
		})
		placement.Place("t", n.address, "sensor")
	})

	// relayed returns a function that waits until a consumer at the front broker has received a text.
	relayed := func(channel string, attributes bool) (receives func(text string)) {
		news := make(chan struct{}, 1)
		sub, err := f.Subscribe(context.Background(), "t", channel, forward.Subscriber{MsgTimeout: time.Minute, Attributes: attributes}, func() {
			select {
			case news <- struct{}{}:
			default:
			}
		})
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(sub.Close)
		Expect(sub.Ready(10)).To(Succeed())
		out := broker.Outgoing{Encoder: listing{}}
		return func(text string) {
			GinkgoHelper()
			for string(out.Frames) != text {
				Expect(text).To(HavePrefix(string(out.Frames)))
				Eventually(news).Should(Receive())
				Expect(sub.Take(&out, 1<<20)).To(BeTrue())
			}
		}
	}

	It("travels with forwarded publishes to relayed consumers that want it, and not to others", func() {
		mqtt, plain := relayed("mqtt", true), relayed("plain", false)
		stock := n.dial()
		stock.send(append(wire.AppendSub(nil, "t", "stock"), wire.AppendRdy(nil, 10)...))
		stock.expect(wire.FrameResponse, "OK")

		line := f.Line(forward.Publisher{ClientID: "sensor", Identity: police.Identity{Kind: "client", ID: "sensor"}})
		DeferCleanup(line.Close)
		long, large := strings.Repeat("a", wire.MaxAttribute), strings.Repeat("x", 1000)
		var pending []*forward.Pending
		var withAttributes, without string
		for _, m := range []pool.Message{
			{Body: []byte("one"), Attribute: []byte("\x00a/b")},
			{Body: nil, Attribute: []byte("empty")},
			{Body: []byte(large), Attribute: []byte(long)},
			{Batch: bodies{"1", "2"}, Attribute: []byte("m")},
			{Body: []byte("later"), Attribute: []byte("d"), Defer: time.Millisecond},
		} {
			pending = append(pending, line.Begin(context.Background(), "t", m))
			all, ok := m.Batch.(bodies)
			if !ok {
				all = bodies{string(m.Body)}
			}
			for _, body := range all {
				withAttributes += string(m.Attribute) + "=" + body + "\n"
				without += "=" + body + "\n"
			}
		}
		for _, p := range pending {
			Expect(p.Verdict(wire.CodePubFailed)).To(Succeed())
		}
		mqtt(withAttributes)
		plain(without)
		var received string
		for received != without {
			received += "=" + string(stock.message().Body) + "\n"
			Expect(without).To(HavePrefix(received))
		}
	})

	It("is absent from the publishes of NSQ clients", func() {
		mqtt := relayed("mqtt", true)
		line := f.Line(forward.Publisher{ClientID: "sensor", Identity: police.Identity{Kind: "client", ID: "sensor"}})
		DeferCleanup(line.Close)
		Expect(line.Begin(context.Background(), "t", pool.Message{Body: []byte("\x03body")}).Verdict(wire.CodePubFailed)).To(Succeed())
		mqtt("=\x03body\n")
	})

	DescribeTable("must be whole, and the rest within the limit of a message", func(command func() []byte, refusal string) {
		p := n.dial()
		secret := origin.Secret([]byte("the key"), origin.Origin{Broker: "b2", Attributes: true}.String())
		p.send(binary.BigEndian.AppendUint32([]byte("AUTH\n"), uint32(len(secret))))
		p.send([]byte(secret))
		p.expect(wire.FrameResponse, `{"identity":"","attributes":true}`)
		p.send(wire.AppendPub(nil, "t", []byte("\x01aok")))
		p.expect(wire.FrameResponse, "OK")
		p.send(command())
		p.expect(wire.FrameError, refusal)
		p.expectEOF()
		t, err := n.broker.Topic([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		Expect(t.Stats().Counters.Accepted).To(BeEquivalentTo(1))
	},
		Entry("PUB", func() []byte { return wire.AppendPub(nil, "t", []byte("\x05abc")) }, "E_BAD_MESSAGE PUB body of 4 bytes is shorter than its attribute of 1+5 bytes"),
		Entry("DPUB", func() []byte { return []byte("DPUB t 10\n\x00\x00\x00\x01\xff") }, "E_BAD_MESSAGE DPUB body of 1 bytes is shorter than its attribute of 1+255 bytes"),
		Entry("MPUB", func() []byte { return wire.AppendMpub(nil, "t", [][]byte{[]byte("\x01ab"), []byte("\x02a")}) }, "E_BAD_MESSAGE MPUB body of 2 bytes is shorter than its attribute of 1+2 bytes"),
		Entry("a large PUB", func() []byte { return wire.AppendPub(nil, "t", append([]byte("\x01a"), make([]byte, 1001)...)) }, "E_BAD_MESSAGE PUB message of 1001 bytes beside its attribute is larger than 1000"),
		Entry("a larger PUB", func() []byte { return wire.AppendPub(nil, "t", make([]byte, 1257)) }, "E_BAD_MESSAGE PUB body of 1257 bytes is outside [1, 1256]"),
	)
})
