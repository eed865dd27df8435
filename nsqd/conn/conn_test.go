package conn_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	nsq "github.com/nsqio/go-nsq"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/tokenbucket"
)

// node is a broker behind a real listener.
type node struct {
	broker  *broker.Broker
	server  *conn.Server
	stamps  *hook.Stamper
	address string
}

func start(change func(*broker.Config, *conn.Config)) *node {
	GinkgoHelper()
	return startWith(hook.Off, change)
}

func startWith(mode hook.Mode, change func(*broker.Config, *conn.Config)) *node {
	GinkgoHelper()
	sc := session.DefaultConfig()
	sc.Version = "test"
	bc := broker.Config{Capacity: 1000, MaxMsgTimeout: time.Minute, AutoCreate: true}
	cc := conn.Config{Session: &sc, WriteTimeout: testkit.Hang, Loops: loops}
	if change != nil {
		change(&bc, &cc)
	}
	log := log
	if log == nil {
		log = slog.New(slog.NewTextHandler(GinkgoWriter, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	b, err := broker.New(bc)
	Expect(err).NotTo(HaveOccurred())
	stamps, err := hook.Open(mode, hook.Config{}, log)
	Expect(err).NotTo(HaveOccurred())
	s, err := conn.New(cc, b, stamps, log)
	Expect(err).NotTo(HaveOccurred())
	ctx, cancel := context.WithCancel(context.Background())
	ln, err := s.Listen(ctx, "127.0.0.1:0")
	Expect(err).NotTo(HaveOccurred())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, ln) }()
	DeferCleanup(func() {
		cancel()
		Eventually(served).Should(Receive(BeNil()))
		b.Close()
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
		defer cancel()
		Expect(s.Shutdown(ctx)).To(Succeed())
		Expect(s.Stats().Connections).To(BeZero())
		Expect(stamps.Close()).To(Succeed())
	})
	return &node{broker: b, server: s, stamps: stamps, address: ln.Addr().String()}
}

// peer speaks the protocol byte by byte.
type peer struct {
	nc net.Conn
	r  *bufio.Reader
}

func (n *node) dial() *peer {
	GinkgoHelper()
	nc, err := net.Dial("tcp", n.address)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() { nc.Close() })
	Expect(nc.SetDeadline(time.Now().Add(testkit.Hang))).To(Succeed())
	p := &peer{nc: nc, r: bufio.NewReader(nc)}
	p.send(wire.AppendMagic(nil))
	return p
}

func (p *peer) send(b []byte) {
	GinkgoHelper()
	_, err := p.nc.Write(b)
	Expect(err).NotTo(HaveOccurred())
}

func (p *peer) frame() (wire.FrameType, string) {
	GinkgoHelper()
	kind, data, err := frames.Read(p.r, 16<<20)
	Expect(err).NotTo(HaveOccurred())
	return kind, string(data)
}

func (p *peer) expect(kind wire.FrameType, data any) {
	GinkgoHelper()
	k, d := p.frame()
	Expect(fmt.Sprintf("%v %s", k, d)).To(HavePrefix(kind.String() + " "))
	if m, ok := data.(OmegaMatcher); ok {
		Expect(d).To(m)
	} else {
		Expect(d).To(Equal(data))
	}
}

func (p *peer) message() wire.Message {
	GinkgoHelper()
	k, d := p.frame()
	Expect(k).To(Equal(wire.FrameMessage), d)
	m, err := wire.ParseMessage([]byte(d))
	Expect(err).NotTo(HaveOccurred())
	return m
}

func (p *peer) expectEOF() {
	GinkgoHelper()
	_, err := p.r.ReadByte()
	Expect(err).To(MatchError(io.EOF))
}

func quietly() *nsq.Config {
	c := nsq.NewConfig()
	c.MaxInFlight = 200
	c.WriteTimeout = testkit.Hang // the default is 1 s, and a loaded machine takes that long to compress
	return c
}

var _ = overBoth("a connection", func() {
	It("carries messages between unmodified go-nsq clients, each once", func() {
		n := start(nil)
		const total = 2000
		var seen [total]atomic.Int32
		var got atomic.Int32
		consumer, err := nsq.NewConsumer("t", "c", quietly())
		Expect(err).NotTo(HaveOccurred())
		consumer.SetLoggerLevel(nsq.LogLevelMax)
		consumer.AddConcurrentHandlers(nsq.HandlerFunc(func(m *nsq.Message) error {
			seen[binary.BigEndian.Uint32(m.Body)].Add(1)
			got.Add(1)
			return nil
		}), 4)
		Expect(consumer.ConnectToNSQD(n.address)).To(Succeed())
		producer, err := nsq.NewProducer(n.address, quietly())
		Expect(err).NotTo(HaveOccurred())
		producer.SetLoggerLevel(nsq.LogLevelMax)
		for i := range total {
			body := binary.BigEndian.AppendUint32(nil, uint32(i))
			if i%3 == 0 {
				Expect(producer.MultiPublish("t", [][]byte{body})).To(Succeed())
			} else {
				Expect(producer.Publish("t", body)).To(Succeed())
			}
		}
		Eventually(got.Load).Should(BeEquivalentTo(total))
		producer.Stop()
		consumer.Stop()
		Eventually(consumer.StopChan).Should(BeClosed())
		for i := range seen {
			Expect(seen[i].Load()).To(BeEquivalentTo(1), "message %d", i)
		}
		topic, err := n.broker.Topic([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		s := topic.Stats()
		Expect(s.Counters.Accepted).To(BeEquivalentTo(total))
		Expect(s.Channels[0].Counters.Finished).To(BeEquivalentTo(total))
		Expect(s.Delivered).To(BeEquivalentTo(total))
	})

	It("answers pipelined commands in order, whatever the chunks they come in", func() {
		n := start(nil)
		p := n.dial()
		var in []byte
		for i := range 50 {
			in = wire.AppendPub(in, "t", make([]byte, 1+i*40))
		}
		in = wire.AppendSub(in, "t", "c")
		in = wire.AppendRdy(in, 100)
		go func() {
			defer GinkgoRecover()
			for i := 0; i < len(in); i += 7 {
				if _, err := p.nc.Write(in[i:min(i+7, len(in))]); err != nil {
					Fail(err.Error())
				}
			}
		}()
		for range 51 {
			p.expect(wire.FrameResponse, "OK")
		}
		for i := range 50 {
			m := p.message()
			Expect(m.Body).To(HaveLen(1 + i*40))
			Expect(m.Attempts).To(BeEquivalentTo(1))
		}
	})

	It("takes a body far larger than its buffer", func() {
		n := start(nil)
		p := n.dial()
		body := make([]byte, 1<<20)
		for i := range body {
			body[i] = byte(i * 31)
		}
		p.send(wire.AppendPub(nil, "t", body))
		p.expect(wire.FrameResponse, "OK")
		p.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 1))
		p.expect(wire.FrameResponse, "OK")
		Expect(p.message().Body).To(Equal(body))
	})

	DescribeTable("refuses what breaks the protocol, with an error, and closes",
		func(in []byte, want string) {
			n := start(nil)
			p := n.dial()
			p.send(in)
			p.expect(wire.FrameError, HavePrefix(want))
			p.expectEOF()
			Expect(n.broker.Topics()).To(BeEmpty(), "a refused command must create nothing")
		},
		Entry("an unknown command", []byte("HELLO\n"), "E_INVALID"),
		Entry("a bad topic name", []byte("PUB no*stars\n"), "E_BAD_TOPIC"),
		Entry("a message above the limit", append([]byte("PUB t\n"), 0x7f, 0, 0, 0), "E_BAD_MESSAGE"),
		Entry("RDY before SUB", wire.AppendRdy(nil, 1), "E_INVALID"),
		Entry("a bad channel name", []byte("SUB t no*stars\n"), "E_BAD_CHANNEL"),
		Entry("IDENTIFY that is not JSON", wire.AppendIdentify(nil, []byte("{")), "E_BAD_BODY"),
	)

	It("lets the last reply arrive though the client keeps sending", func() {
		n := start(nil)
		p := n.dial()
		p.send(append([]byte("NONSENSE\n"), make([]byte, 100_000)...))
		p.expect(wire.FrameError, HavePrefix("E_INVALID"))
	})

	It("refuses topics that the loaddistributor did not place here, and creates none", func() {
		n := start(func(b *broker.Config, _ *conn.Config) { b.AutoCreate = false })
		p := n.dial()
		p.send(wire.AppendPub(nil, "elsewhere", []byte("x")))
		p.expect(wire.FrameError, And(HavePrefix("E_BAD_TOPIC"), ContainSubstring("elsewhere")))
		Expect(n.broker.Topics()).To(BeEmpty())
	})

	It("gives messages to the nearest consumer that takes some", func() {
		n := start(func(_ *broker.Config, c *conn.Config) { c.Region, c.Zone = "r1", "z1" })
		consumers := map[string]*peer{}
		for name, where := range map[string]string{
			"zone":   `{"topology_region":"r1","topology_zone":"z1"}`,
			"region": `{"topology_region":"r1","topology_zone":"z2"}`,
			"other":  `{"topology_region":"r2","topology_zone":"z1"}`,
		} {
			p := n.dial()
			p.send(wire.AppendIdentify(nil, []byte(where)))
			p.expect(wire.FrameResponse, "OK")
			p.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 1))
			p.expect(wire.FrameResponse, "OK")
			consumers[name] = p
		}
		Eventually(func() (ready int) {
			for _, c := range n.server.Clients() {
				ready += c.Ready
			}
			return ready
		}).Should(Equal(3))
		p := n.dial()
		for i, name := range []string{"zone", "region", "other"} {
			p.send(wire.AppendPub(nil, "t", []byte(name)))
			p.expect(wire.FrameResponse, "OK")
			Expect(string(consumers[name].message().Body)).To(Equal(name), "message %d", i)
		}
		Expect(n.broker.Topics()[0].Stats().Channels[0].Counters.ByDistance).To(Equal([queue.Distances]uint64{1, 1, 1}))
	})

	It("refuses a consumer too many", func() {
		n := start(func(b *broker.Config, _ *conn.Config) { b.MaxChannelConsumers = 1 })
		for range 2 {
			p := n.dial()
			p.send(wire.AppendSub(nil, "t", fmt.Sprint("c", len(n.broker.Topics()))))
			p.expect(wire.FrameResponse, "OK")
		}
		p := n.dial()
		p.send(wire.AppendSub(nil, "t", "c1"))
		p.expect(wire.FrameError, HavePrefix("E_SUB_FAILED SUB failed, "))
		p.expectEOF()
	})

	It("refuses topics and channels too many, and serves those there are", func() {
		n := start(func(b *broker.Config, _ *conn.Config) { b.MaxTopics, b.MaxTopicChannels = 1, 1 })
		sub, pub := n.dial(), n.dial()
		sub.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 1))
		sub.expect(wire.FrameResponse, "OK")
		for in, want := range map[string]string{
			string(wire.AppendPub(nil, "u", []byte("x"))): "E_PUB_FAILED PUB failed, ",
			string(wire.AppendSub(nil, "u", "c")):         "E_SUB_FAILED SUB failed, ",
			string(wire.AppendSub(nil, "t", "d")):         "E_SUB_FAILED SUB failed, ",
		} {
			p := n.dial()
			p.send([]byte(in))
			p.expect(wire.FrameError, HavePrefix(want))
			p.expectEOF()
		}
		pub.send(wire.AppendPub(nil, "t", []byte("x")))
		pub.expect(wire.FrameResponse, "OK")
		Expect(string(sub.message().Body)).To(Equal("x"))
	})

	It("refuses a publish to a full topic without closing, and loses nothing", func() {
		n := start(func(b *broker.Config, _ *conn.Config) { b.Capacity = 2 })
		p := n.dial()
		for range 2 {
			p.send(wire.AppendPub(nil, "t", []byte("kept")))
			p.expect(wire.FrameResponse, "OK")
		}
		p.send(wire.AppendPub(nil, "t", []byte("refused")))
		p.expect(wire.FrameError, HavePrefix("E_QUEUE_FULL"))
		p.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 5))
		p.expect(wire.FrameResponse, "OK")
		for range 2 {
			Expect(string(p.message().Body)).To(Equal("kept"))
		}
	})

	It("answers when to come back where the policy is to reject", func() {
		n := start(nil)
		testkit.Result(n.broker.Node().Prepare("t", nil, 0, 0, 0, srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT, nil)).Must(GinkgoTB())
		share := tokenbucket.Share{Rate: tokenbucket.PerSecond(0.5), Burst: 1}
		testkit.Result(n.broker.Node().Grant("t", share, share, mono.Never, mono.Never, tokenbucket.Token)).Must(GinkgoTB())
		p := n.dial()
		p.send(wire.AppendPub(nil, "t", []byte("conformant")))
		p.expect(wire.FrameResponse, "OK")
		p.send(wire.AppendPub(nil, "t", []byte("too soon")))
		_, text := p.frame()
		after, ok := wire.ParseError([]byte(text)).RetryAfter()
		Expect(ok).To(BeTrue(), text)
		Expect(after).To(And(BeNumerically(">", 0), BeNumerically("<=", 4*time.Second)))
	})

	It("gives a message back when its subscriber vanishes", func() {
		n := start(nil)
		first := n.dial()
		first.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 1))
		first.expect(wire.FrameResponse, "OK")
		p := n.dial()
		p.send(wire.AppendPub(nil, "t", []byte("again")))
		p.expect(wire.FrameResponse, "OK")
		id := first.message().ID
		Expect(first.nc.Close()).To(Succeed())

		second := n.dial()
		second.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 1))
		second.expect(wire.FrameResponse, "OK")
		m := second.message()
		Expect(m.ID).To(Equal(id))
		Expect(m.Attempts).To(BeEquivalentTo(2))
		second.send(wire.AppendFin(nil, m.ID))
		second.send(wire.AppendFin(nil, m.ID))
		second.expect(wire.FrameError, HavePrefix("E_FIN_FAILED"))
		second.send(wire.AppendNop(nil)) // not fatal: the connection stays open
		second.send([]byte("CLS\n"))
		second.expect(wire.FrameResponse, "CLOSE_WAIT")
	})

	It("ends publishers at a message boundary and subscribers last", func() {
		n := start(nil)
		sub := n.dial()
		sub.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 10))
		sub.expect(wire.FrameResponse, "OK")
		p := n.dial()
		p.send(wire.AppendPub(nil, "t", []byte("last")))
		p.expect(wire.FrameResponse, "OK")
		n.server.StopReading()
		p.expectEOF()
		m := sub.message()
		done := make(chan int)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), testkit.Hang)
			defer cancel()
			done <- n.broker.Drain(ctx)
		}()
		Consistently(done, "50ms").ShouldNot(Receive())
		sub.send(wire.AppendFin(nil, m.ID))
		Eventually(done).Should(Receive(BeZero()))
	})

	It("counts a publisher at every topic it publishes to, as long as it is there", func() {
		n := start(nil)
		publishers := func(name string) func() int {
			return func() int {
				t, err := n.broker.CreateTopic(name)
				Expect(err).NotTo(HaveOccurred())
				return t.Stats().Publishers
			}
		}
		p := n.dial()
		for _, topic := range []string{"a", "b", "a", "b", "c"} {
			p.send(wire.AppendPub(nil, topic, []byte("x")))
			p.expect(wire.FrameResponse, "OK")
		}
		for _, topic := range []string{"a", "b", "c"} {
			Expect(publishers(topic)()).To(Equal(1), topic)
		}
		Expect(n.broker.DeleteTopic("b")).To(Succeed())
		p.send(wire.AppendPub(nil, "b", []byte("x")))
		p.expect(wire.FrameResponse, "OK")
		for _, topic := range []string{"a", "b", "c"} {
			Expect(publishers(topic)()).To(Equal(1), topic)
		}
		for i := range 200 { // the connection remembers the last topics
			p.send(wire.AppendPub(nil, fmt.Sprintf("t%d", i), []byte("x")))
			p.expect(wire.FrameResponse, "OK")
		}
		Expect(publishers("t199")()).To(Equal(1))
		Expect(publishers("a")()).To(BeZero())
		Expect(p.nc.Close()).To(Succeed())
		for i := range 200 {
			Eventually(publishers(fmt.Sprintf("t%d", i))).Should(BeZero())
		}
	})

	It("does not blame a subscriber for its channel's end", func() {
		n := start(nil)
		topic, err := n.broker.CreateTopic("t")
		Expect(err).NotTo(HaveOccurred())
		for range 20 {
			p := n.dial()
			p.send(wire.AppendSub(nil, "t", "c"))
			p.expect(wire.FrameResponse, "OK")
			sent := make(chan struct{})
			go func() {
				defer close(sent)
				for rdy := wire.AppendRdy(nil, 1); ; { // until the connection ends
					if _, err := p.nc.Write(rdy); err != nil {
						return
					}
				}
			}()
			Expect(topic.DeleteChannel("c")).To(Succeed())
			p.expectEOF()
			Expect(p.nc.Close()).To(Succeed())
			Eventually(sent).Should(BeClosed())
		}
		Expect(n.server.Stats().Faults).To(BeZero())
	})

	It("lets a publisher that pipelines read all its answers when it is stopped", func() {
		n := start(func(b *broker.Config, _ *conn.Config) { b.Capacity = 1 << 20 })
		answeredToTheEnd(n, n.dial(), n.server.StopReading)
	})

	It("lets a subscriber read why it was refused, though it keeps sending", func() {
		n := start(nil)
		p := n.dial()
		p.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 1))
		p.expect(wire.FrameResponse, "OK")
		in := wire.AppendRdy(nil, 1_000_000)
		for range 20_000 {
			in = wire.AppendNop(in)
		}
		p.send(in)
		p.expect(wire.FrameError, HavePrefix("E_INVALID"))
		p.expectEOF()
	})

	It("delays a subscriber's messages only when buffering is strict", func() {
		n := start(func(_ *broker.Config, c *conn.Config) { c.StrictBuffering = true })
		sub := n.dial()
		sub.send(wire.AppendIdentify(nil, []byte(`{"output_buffer_timeout":200,"output_buffer_size":16384}`)))
		sub.expect(wire.FrameResponse, "OK")
		sub.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 10))
		sub.expect(wire.FrameResponse, "OK")
		p := n.dial()
		p.send(wire.AppendMpub(nil, "t", make2D(2)))
		p.expect(wire.FrameResponse, "OK")
		sub.message()
		sub.message()
		topic, err := n.broker.Topic([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		// The broker's own metric shows that both messages waited for the buffer's timeout.
		Eventually(func() time.Duration { return topic.Stats().Processing.Quantile(0.01) }).
			Should(BeNumerically(">=", 50*time.Millisecond))
	})
})
