package fleet_test

import (
	"context"
	"encoding/binary"
	"net"
	"sync"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/mqtt/packet"
	"github.com/srtm-io/srtm/tools/iotpub/fleet"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
	"github.com/srtm-io/srtm/tools/iotpub/schedule"
)

// mqttBroker is a small broker of MQTT 5.0 for publishers.
type mqttBroker struct {
	listener net.Listener
	conns    sync.WaitGroup

	mu struct {
		sync.Mutex
		open     []net.Conn
		connects int
		pings    int
		ahead    int // maximum number of messages without a PUBACK on a connection
		names    map[string]bool
		received map[uint32][]uint32 // sequence numbers by publisher

		refuse    byte   // reason of every third PUBACK; 0: none
		shift     uint16 // added to each packet id of a PUBACK
		reference string // answer to CONNECT; "": accepted
		moves     string // answer to PUBLISH, in place of a PUBACK; "": PUBACK
		maximum   int    // Receive Maximum; 0: acknowledge each message at once
	}
}

func newMQTTBroker() *mqttBroker {
	GinkgoHelper()
	b := &mqttBroker{}
	b.mu.names, b.mu.received = map[string]bool{}, map[uint32][]uint32{}
	var err error
	b.listener, err = net.Listen("tcp", "127.0.0.1:0")
	Expect(err).NotTo(HaveOccurred())
	b.conns.Go(func() {
		for {
			c, err := b.listener.Accept()
			if err != nil {
				return
			}
			b.mu.Lock()
			b.mu.open = append(b.mu.open, c)
			b.mu.Unlock()
			b.conns.Go(func() { b.serve(c) })
		}
	})
	DeferCleanup(b.close)
	return b
}

func (b *mqttBroker) address() string { return b.listener.Addr().String() }

func (b *mqttBroker) close() {
	_ = b.listener.Close()
	b.mu.Lock()
	for _, c := range b.mu.open {
		_ = c.Close()
	}
	b.mu.Unlock()
	b.conns.Wait()
}

// say sends a packet on every connection.
func (b *mqttBroker) say(text []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.mu.open {
		_, _ = c.Write(text)
	}
}

func (b *mqttBroker) serve(c net.Conn) {
	defer GinkgoRecover()
	defer c.Close()
	var in []byte
	var waiting [][]byte // PUBACKs
	buf := make([]byte, 1<<16)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return
		}
		in = append(in, buf[:n]...)
		for {
			kind, body, n, err := packet.Parse(in, 1<<16)
			Expect(err).NotTo(HaveOccurred())
			if n == 0 {
				break
			}
			waiting = b.handle(c, kind, body, waiting)
			in = in[n:]
		}
		for _, answer := range waiting { // the publisher has sent all it may
			_, _ = c.Write(answer)
		}
		waiting = nil
	}
}

func (b *mqttBroker) handle(c net.Conn, kind packet.Kind, body []byte, waiting [][]byte) [][]byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch kind {
	case packet.Connect:
		b.mu.connects++
		answer := []byte{0, 0, 0}
		if b.mu.reference != "" {
			answer = append([]byte{0, 0x9C, byte(3 + len(b.mu.reference)), 0x1C, 0, byte(len(b.mu.reference))}, b.mu.reference...)
		} else if b.mu.maximum > 0 {
			answer = []byte{0, 0, 3, 0x21, 0, byte(b.mu.maximum)}
		}
		_, _ = c.Write(packet.Append(nil, packet.Connack, answer))
	case packet.PingRequest:
		b.mu.pings++
		_, _ = c.Write(packet.Append(nil, packet.PingReply, nil))
	case packet.Publish | 2:
		name, text, id, err := packet.ParseDelivery(packet.V5, body)
		Expect(err).NotTo(HaveOccurred())
		p, ok := payload.Parse(text)
		Expect(ok).To(BeTrue())
		if b.mu.moves != "" {
			_, _ = c.Write(disconnect(b.mu.moves))
			break
		}
		b.mu.names[string(name)] = true
		b.mu.received[p.Source] = append(b.mu.received[p.Source], p.Seq)
		answer := binary.BigEndian.AppendUint16(nil, id+b.mu.shift)
		if b.mu.refuse != 0 && p.Seq%3 == 0 {
			answer = append(answer, b.mu.refuse)
		}
		if waiting = append(waiting, packet.Append(nil, packet.Puback, answer)); len(waiting) > b.mu.ahead {
			b.mu.ahead = len(waiting)
		}
	default:
		Fail("unexpected packet")
	}
	return waiting
}

// disconnect is a DISCONNECT with a server reference.
func disconnect(reference string) []byte {
	return append([]byte{byte(packet.Disconnect), byte(5 + len(reference)), 0x9D, byte(3 + len(reference)), 0x1C, 0, byte(len(reference))}, reference...)
}

func (b *mqttBroker) count(what *int) func() int {
	return func() int {
		b.mu.Lock()
		defer b.mu.Unlock()
		return *what
	}
}

var _ = Describe("a fleet of MQTT", func() {
	var (
		b       *mqttBroker
		spec    schedule.Spec
		cfg     fleet.Config
		f       *fleet.Fleet
		running sync.WaitGroup
		ended   error
	)
	BeforeEach(func() {
		b = newMQTTBroker()
		spec = schedule.Spec{Publishers: 20, Rate: 50, Batch: 1, Process: schedule.Poisson, Size: 100, Seed: 42}
		cfg = fleet.Config{MQTT: true, Topic: topic, Run: run, Address: b.address(), Drain: testkit.Hang}
	})
	// start connects a fleet and sends for the given number of messages of each publisher, about.
	start := func() {
		GinkgoHelper()
		cfg.Sources = spec.Sources()
		cfg.Stream = func() schedule.Stream { return schedule.Until(spec.Stream(), 200*testkit.Hang) }
		var err error
		f, err = fleet.New(cfg)
		Expect(err).NotTo(HaveOccurred())
		ctx, cancel := context.WithCancel(context.Background())
		running.Go(func() { ended = f.Run(ctx) })
		DeferCleanup(func() {
			cancel()
			running.Wait()
		})
		ready, end := context.WithTimeout(ctx, testkit.Hang)
		defer end()
		Expect(f.Ready(ready)).To(Succeed())
		f.Start(clock.Mono())
	}
	accepted := func() uint64 { return f.Stats().Accepted }
	finish := func() fleet.Stats {
		GinkgoHelper()
		f.Stop()
		running.Wait()
		Expect(ended).NotTo(HaveOccurred())
		s := f.Stats()
		Expect(s.Offered).To(Equal(s.Accepted+s.RefusedTotal()+s.Unanswered+s.Skipped), "%+v", s)
		Expect(f.Accepted().Len()).To(Equal(s.Accepted))
		return s
	}

	It("sends each message once, in order, under the publisher's own name", func() {
		cfg.Name = "fleet/{id}/t"
		start()
		Eventually(accepted).Should(BeNumerically(">", 200))
		s := finish()
		Expect(s.Accepted).To(Equal(s.Offered))
		Expect(s.Lost + s.Strange + s.Moved).To(BeZero())
		Expect(b.mu.names).To(HaveLen(20))
		Expect(b.mu.names).To(HaveKey("fleet/" + cfg.Sources[3].ID + "/t"))
		for source, messages := range b.mu.received {
			for i, seq := range messages {
				Expect(seq).To(BeNumerically("==", i), "publisher %d", source)
			}
		}
	})

	It("keeps to the broker's Receive Maximum, also with batches", func() {
		b.mu.maximum, spec.Batch, spec.Rate = 4, 10, 100
		start()
		Eventually(accepted).Should(BeNumerically(">", 500))
		s := finish()
		Expect(s.Accepted + s.Skipped).To(Equal(s.Offered))
		Expect(b.mu.ahead).To(BeNumerically("<=", 4))
		Expect(s.Strange).To(BeZero())
	})

	It("counts refusals by their reason", func() {
		b.mu.refuse = 0x97
		start()
		Eventually(accepted).Should(BeNumerically(">", 100))
		s := finish()
		Expect(s.Refused).To(HaveLen(1))
		Expect(s.Refused["0x97"]).To(BeNumerically(">=", s.Accepted/3))
		Expect(s.Lost).To(BeZero())
	})

	It("sends PINGREQ within the keep alive", func() {
		spec.Rate, cfg.Heartbeat = .001, 1e9
		start()
		Eventually(b.count(&b.mu.pings)).Should(BeNumerically(">=", 20))
		finish()
	})

	It("hangs up on a PUBACK of another packet", func() {
		b.mu.shift = 1
		start()
		Eventually(func() uint64 { return f.Stats().Strange }).Should(BeNumerically(">", 10))
		Expect(f.Stats().LastError).To(ContainSubstring("a PUBACK of packet"))
		Expect(finish().Accepted).To(BeZero())
	})

	It("sends again what a broker did not acknowledge before a redirection", func() {
		other := newMQTTBroker()
		b.mu.moves = other.address()
		start()
		Eventually(func() uint64 { return f.Stats().Moved }).Should(BeNumerically("==", 20))
		Eventually(accepted).Should(BeNumerically(">", 1000))
		s := finish()
		Expect(s.Accepted).To(Equal(s.Offered))
		Expect(s.Sent).To(Equal(s.Offered))
	})

	It("follows redirections, and returns to the first broker when the other has ended", func() {
		other := newMQTTBroker()
		b.mu.reference = other.address()
		start()
		Eventually(accepted).Should(BeNumerically(">", 100))
		Expect(b.count(&b.mu.connects)()).To(Equal(20))
		Expect(other.count(&other.mu.connects)()).To(Equal(20))
		Expect(f.Stats().Lost).To(BeZero())
		By("a move of the placement")
		third := newMQTTBroker()
		was := accepted()
		other.say(disconnect(third.address()))
		Eventually(func() uint64 { return f.Stats().Moved }).Should(BeNumerically("==", 20))
		Eventually(accepted).Should(BeNumerically(">", was+100))
		Expect(f.Stats().Lost).To(BeZero())
		By("the end of the third broker")
		b.mu.Lock()
		b.mu.reference = ""
		b.mu.Unlock()
		third.close()
		Eventually(b.count(&b.mu.connects)).Should(BeNumerically(">=", 40))
		was = accepted()
		Eventually(accepted).Should(BeNumerically(">", was+100))
		s := finish()
		Expect(s.Lost).To(BeNumerically(">=", 20))
		Expect(s.Strange).To(BeZero())
	})
})
