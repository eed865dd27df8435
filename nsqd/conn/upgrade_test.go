package conn_test

import (
	"bufio"
	"bytes"
	"compress/flate"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/golang/snappy"
	nsq "github.com/nsqio/go-nsq"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// secure is a node that offers TLS, with the authority that signed its certificate.
type secure struct {
	*node
	authority *testkit.Authority
}

func startSecure(change func(*conn.Config)) *secure {
	GinkgoHelper()
	return startSecureWith(hook.Off, change)
}

func startSecureWith(mode hook.Mode, change func(*conn.Config)) *secure {
	GinkgoHelper()
	a := testkit.NewAuthority(GinkgoTB())
	n := startWith(mode, func(_ *broker.Config, c *conn.Config) {
		c.TLS = &tls.Config{Certificates: []tls.Certificate{a.Certificate("nsqd").TLS}, ClientCAs: a.Pool}
		c.Session.TLS = true
		if change != nil {
			change(c)
		}
	})
	return &secure{n, a}
}

func (s *secure) clientTLS(certificates ...tls.Certificate) *tls.Config {
	return &tls.Config{RootCAs: s.authority.Pool, ServerName: "localhost", Certificates: certificates}
}

// wrapping is the set of features that a peer negotiates.
type wrapping struct {
	tls     bool
	snappy  bool
	deflate int // level
}

func (w wrapping) String() string {
	switch {
	case w == wrapping{}:
		return "plain"
	case w.snappy:
		return fmt.Sprintf("tls=%v snappy", w.tls)
	case w.deflate > 0:
		return fmt.Sprintf("tls=%v deflate=%d", w.tls, w.deflate)
	}
	return "tls"
}

var wrappings = []wrapping{
	{}, {tls: true}, {snappy: true}, {deflate: 1}, {deflate: 6}, {tls: true, snappy: true}, {tls: true, deflate: 3},
}

// identify negotiates w. more has further fields of the body.
func (p *peer) identify(w wrapping, more string) wire.IdentifyResponse {
	GinkgoHelper()
	p.send(wire.AppendIdentify(nil, fmt.Appendf(nil, `{"feature_negotiation":true,"tls_v1":%v,"snappy":%v,"deflate":%v,"deflate_level":%d%s}`,
		w.tls, w.snappy, w.deflate > 0, w.deflate, more)))
	var granted wire.IdentifyResponse
	Expect(json.Unmarshal([]byte(p.answer()), &granted)).To(Succeed())
	return granted
}

// answer reads the next response. Heartbeats may come before the response.
func (p *peer) answer() string {
	GinkgoHelper()
	for {
		kind, text := p.frame()
		Expect(kind).To(Equal(wire.FrameResponse), text)
		if text != wire.Heartbeat {
			return text
		}
	}
}

// flusher is the common interface of the two compressors in this suite.
type flusher interface {
	io.Writer
	Flush() error
}

// packed is a connection through a compressor of another implementation than the node's.
type packed struct {
	net.Conn
	w flusher
}

func (p packed) Write(b []byte) (int, error) {
	if _, err := p.w.Write(b); err != nil {
		return 0, err
	}
	return len(b), p.w.Flush()
}

// upgrade negotiates w and reads the OK after each step.
func (p *peer) upgrade(s *secure, w wrapping, more string) {
	GinkgoHelper()
	granted := p.identify(w, more)
	Expect(granted.TLSv1).To(Equal(w.tls))
	Expect(granted.Snappy).To(Equal(w.snappy))
	Expect(granted.Deflate).To(Equal(w.deflate > 0))
	if w.tls {
		p.nc = tls.Client(p.nc, s.clientTLS())
		p.r = bufio.NewReader(p.nc)
		Expect(p.answer()).To(Equal(wire.OK))
	}
	switch {
	case w.snappy:
		p.r = bufio.NewReader(snappy.NewReader(p.r)) // the old reader may already hold the OK
		p.nc = packed{p.nc, snappy.NewBufferedWriter(p.nc)}
		Expect(p.answer()).To(Equal(wire.OK))
	case w.deflate > 0:
		p.r = bufio.NewReader(flate.NewReader(p.r))
		fw, err := flate.NewWriter(p.nc, w.deflate)
		Expect(err).NotTo(HaveOccurred())
		p.nc = packed{p.nc, fw}
		Expect(p.answer()).To(Equal(wire.OK))
	}
}

var _ = overBoth("a wrapped connection", func() {
	for _, w := range wrappings {
		It("carries messages between unmodified go-nsq clients, each once: "+w.String(), func() {
			n := startSecure(func(c *conn.Config) { c.Session.TLSRequired = w.tls })
			config := quietly()
			config.TlsV1, config.TlsConfig = w.tls, n.clientTLS()
			config.Snappy = w.snappy
			config.Deflate, config.DeflateLevel = w.deflate > 0, max(w.deflate, 1)
			const total = 250 // more than may be in flight
			var seen [total]atomic.Int32
			var got, wrong atomic.Int32
			body := func(i int) []byte {
				return append(binary.BigEndian.AppendUint32(nil, uint32(i)), bytes.Repeat([]byte{byte(i), byte(i >> 4), 7}, i*i%9000)...)
			}
			consumer, err := nsq.NewConsumer("t", "c", config)
			Expect(err).NotTo(HaveOccurred())
			consumer.SetLoggerLevel(nsq.LogLevelMax)
			consumer.AddConcurrentHandlers(nsq.HandlerFunc(func(m *nsq.Message) error {
				i := int(binary.BigEndian.Uint32(m.Body))
				if !bytes.Equal(m.Body, body(i)) {
					wrong.Add(1)
				}
				seen[i].Add(1)
				got.Add(1)
				return nil
			}), 4)
			Expect(consumer.ConnectToNSQD(n.address)).To(Succeed())
			producer, err := nsq.NewProducer(n.address, config)
			Expect(err).NotTo(HaveOccurred())
			producer.SetLoggerLevel(nsq.LogLevelMax)
			for i := range total {
				if i%3 == 0 {
					Expect(producer.MultiPublish("t", [][]byte{body(i)})).To(Succeed())
				} else {
					Expect(producer.Publish("t", body(i))).To(Succeed())
				}
			}
			Eventually(got.Load).Should(BeEquivalentTo(total))
			producer.Stop()
			consumer.Stop()
			Eventually(consumer.StopChan).Should(BeClosed())
			Expect(wrong.Load()).To(BeZero())
			for i := range seen {
				Expect(seen[i].Load()).To(BeEquivalentTo(1), "message %d", i)
			}
			Expect(n.server.Stats().Faults).To(BeZero())
		})

		It("answers pipelined commands in order: "+w.String(), func() {
			n := startSecure(nil)
			p := n.dial()
			p.upgrade(n, w, "")
			var in []byte
			for i := range 50 {
				in = wire.AppendPub(in, "t", make([]byte, 1+i*40))
			}
			in = wire.AppendRdy(wire.AppendSub(in, "t", "c"), 100)
			p.send(in)
			for range 51 {
				p.expect(wire.FrameResponse, "OK")
			}
			for i := range 50 {
				Expect(p.message().Body).To(HaveLen(1 + i*40))
			}
			topic, err := n.broker.Topic([]byte("t"))
			Expect(err).NotTo(HaveOccurred())
			var stamped uint64
			for _, count := range topic.Stats().Sources {
				stamped += count
			}
			Expect(stamped).To(BeEquivalentTo(50), "messages with an arrival time")
		})

		It("ends at a message boundary when the node stops reading: "+w.String(), func() {
			n := startSecure(nil)
			p := n.dial()
			p.upgrade(n, w, "")
			p.send(wire.AppendPub(nil, "t", []byte("last")))
			p.expect(wire.FrameResponse, "OK")
			n.server.StopReading()
			_, err := p.r.ReadByte()
			Expect(err).To(Or(MatchError(io.EOF), MatchError(io.ErrUnexpectedEOF)))
		})

		It("that vanishes in the middle of a command is no fault: "+w.String(), func() {
			n := startSecure(nil)
			p := n.dial()
			p.upgrade(n, w, "")
			p.send(wire.AppendPub(nil, "t", make([]byte, 1000))[:500])
			Expect(p.nc.Close()).To(Succeed())
			Eventually(func() int { return n.server.Stats().Connections }).Should(BeZero())
			Expect(n.server.Stats().Faults).To(BeZero())
			Expect(n.broker.Topics()).To(BeEmpty())
		})
	}

	It("lives on heartbeats, and is closed when it is silent for two heartbeat intervals", func() {
		n := startSecure(nil)
		// An interval is long, since a busy machine may stop a live client for less than two intervals.
		join := func(w wrapping) *peer {
			p := n.dial()
			p.upgrade(n, w, `,"heartbeat_interval":1500`)
			return p
		}
		live := []*peer{join(wrapping{}), join(wrapping{tls: true, deflate: 3})} // without a layer, and with all
		var silent []*peer
		for _, w := range wrappings {
			silent = append(silent, join(w))
		}
		for range 3 {
			for _, p := range live {
				p.expect(wire.FrameResponse, wire.Heartbeat)
				p.send(wire.AppendNop(nil))
			}
		}
		for _, p := range live {
			p.send(wire.AppendPub(nil, "t", []byte("x")))
			Expect(p.answer()).To(Equal(wire.OK))
		}
		for i, p := range silent {
			p.expect(wire.FrameResponse, wire.Heartbeat)
			_, err := io.Copy(io.Discard, p.r)
			Expect(err).To(Or(BeNil(), MatchError(io.ErrUnexpectedEOF)), "%v: the stream ends", wrappings[i])
		}
	})

	for _, w := range []wrapping{{tls: true}, {snappy: true}, {tls: true, deflate: 6}} {
		It("keeps the arrival times that the kernel has: "+w.String(), func() {
			n := startSecureWith(hook.Auto, nil)
			p := n.dial()
			p.upgrade(n, w, "")
			const messages = 20
			before := clock.Mono()
			for range messages {
				p.send(wire.AppendPub(nil, "t", make([]byte, 3000))) // more than a segment
				p.expect(wire.FrameResponse, "OK")
			}
			after := clock.Mono()
			topic, err := n.broker.Topic([]byte("t"))
			Expect(err).NotTo(HaveOccurred())
			by := map[stamp.Source]uint64{}
			for source, count := range topic.Stats().Sources {
				if count > 0 {
					by[stamp.Source(source)] = count
				}
			}
			want := stamp.Read
			switch n.stamps.Info().Source {
			case "ebpf":
				want = stamp.Exact
				if w.snappy || w.deflate > 0 {
					want = stamp.UpperBound // decompressors read ahead
				}
			case "sotimestamp":
				want = stamp.UpperBound
			}
			Expect(by).To(Equal(map[stamp.Source]uint64{want: messages}), n.stamps.Info().Source)
			// No message arrived before the first was sent, or after the last OK. The two times bound each message's age
			// at delivery.
			sub := n.dial()
			subscribed := clock.Mono()
			sub.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), messages))
			sub.expect(wire.FrameResponse, "OK")
			for range messages {
				sub.message()
			}
			var stats broker.Stats
			Eventually(func() uint64 { stats = topic.Stats(); return stats.Delivered }).Should(BeEquivalentTo(messages))
			most := clock.Mono().Sub(before)
			Expect(stats.Consumer.Quantile(1)).To(BeNumerically("<=", most+most/50+time.Millisecond))
			Expect(stats.Consumer.Quantile(0.001)).To(BeNumerically(">=", subscribed.Sub(after)))
		})
	}

	It("signals to a TLS peer that the stream is complete", func() {
		n := startSecure(nil)
		p := n.dial()
		p.identify(wrapping{tls: true}, "")
		raw := &tail{Conn: p.nc}
		config := n.clientTLS()
		config.MaxVersion = tls.VersionTLS12 // TLS 1.2 shows the type of a record
		p.nc = tls.Client(raw, config)
		p.r = bufio.NewReader(p.nc)
		p.expect(wire.FrameResponse, "OK")
		p.send([]byte("NONSENSE\n"))
		p.expect(wire.FrameError, HavePrefix("E_INVALID"))
		p.expectEOF()
		Expect(raw.lastRecord()).To(BeEquivalentTo(21), "an alert is the last record")
	})

	It("costs the client that it had to read on for nothing when it did not speak TLS after all", func() {
		n := startSecure(nil)
		p := n.dial()
		p.identify(wrapping{tls: true}, "")
		p.send([]byte("SUB t c\nRDY 1\n"))
		p.expect(wire.FrameError, HavePrefix("E_IDENTIFY_FAILED"))
		p.expectEOF()
		Eventually(func() uint64 { return n.server.Stats().Faults }).Should(BeEquivalentTo(1))
	})

	It("is refused where commands came before the answer", func() {
		n := startSecure(nil)
		p := n.dial()
		p.send(append(wire.AppendIdentify(nil, []byte(`{"feature_negotiation":true,"snappy":true}`)), "NOP\n"...))
		p.expect(wire.FrameResponse, ContainSubstring(`"snappy":true`))
		p.expect(wire.FrameError, HavePrefix("E_INVALID"))
		p.expectEOF()
	})

	It("is required where the node requires it", func() {
		n := startSecure(func(c *conn.Config) { c.Session.TLSRequired = true })
		p := n.dial()
		p.identify(wrapping{snappy: true}, "")
		p.r = bufio.NewReader(snappy.NewReader(p.r))
		p.nc = packed{p.nc, snappy.NewBufferedWriter(p.nc)}
		p.expect(wire.FrameResponse, "OK")
		p.send(wire.AppendPub(nil, "t", []byte("x")))
		p.expect(wire.FrameError, HavePrefix("E_INVALID PUB before TLS"))
		Expect(n.broker.Topics()).To(BeEmpty())
	})

	DescribeTable("requests the client's certificate by the policy",
		func(policy tls.ClientAuthType, good, foreign, none bool) {
			n := startSecure(func(c *conn.Config) { c.TLS.ClientAuth = policy })
			try := func(what string, want bool, certificates ...tls.Certificate) {
				GinkgoHelper()
				p := n.dial()
				p.identify(wrapping{tls: true}, "")
				config := n.clientTLS()
				config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
					if len(certificates) == 0 {
						return new(tls.Certificate), nil
					}
					return &certificates[0], nil // though the server does not name its authority
				}
				p.nc = tls.Client(p.nc, config)
				p.r = bufio.NewReader(p.nc)
				ok := make([]byte, 10)
				_, err := io.ReadFull(p.r, ok)
				Expect(err == nil).To(Equal(want), "%s: %v", what, err)
			}
			try("a certificate of our authority", good, n.authority.Certificate("client").TLS)
			try("a certificate of another", foreign, testkit.NewAuthority(GinkgoTB()).Certificate("client").TLS)
			try("none", none)
			Eventually(func() uint64 { return n.server.Stats().Faults }).Should(BeEquivalentTo(count(!good, !foreign, !none)))
		},
		Entry("none requested", tls.NoClientCert, true, true, true),
		Entry("any", tls.RequireAnyClientCert, true, true, false),
		Entry("verified", tls.RequireAndVerifyClientCert, true, false, false),
	)

	DescribeTable("ends when what comes cannot be unpacked, and counts it as a fault",
		func(w wrapping, damage []byte) {
			n := startSecure(nil)
			p := n.dial()
			p.upgrade(n, w, "")
			raw := p.nc.(packed).Conn
			_, err := raw.Write(damage)
			Expect(err).NotTo(HaveOccurred())
			_, err = p.r.ReadByte()
			Expect(err).To(HaveOccurred())
			Eventually(func() uint64 { return n.server.Stats().Faults }).Should(BeEquivalentTo(1))
			Expect(n.broker.Topics()).To(BeEmpty())
		},
		Entry("snappy without its identifier", wrapping{snappy: true}, []byte("PUB t\n\x00\x00\x00\x01x and more of it")),
		Entry("snappy with a wrong checksum", wrapping{snappy: true}, []byte("\xff\x06\x00\x00sNaPpY\x01\x05\x00\x00\x00\x00\x00\x00N")),
		Entry("snappy with a chunk that is too large", wrapping{snappy: true}, []byte("\xff\x06\x00\x00sNaPpY\x01\xff\xff\xff")),
		Entry("deflate with a block of no type", wrapping{deflate: 6}, []byte("\xff\xff\xff\xff")),
		Entry("snappy within TLS", wrapping{tls: true, snappy: true}, []byte("plain text in TLS")),
	)
})

func count(bools ...bool) (n int) {
	for _, b := range bools {
		if b {
			n++
		}
	}
	return n
}

// tail keeps the data read from a connection.
type tail struct {
	net.Conn
	got []byte
}

func (t *tail) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	t.got = append(t.got, p[:n]...)
	return n, err
}

// lastRecord returns the type of the last TLS record.
func (t *tail) lastRecord() (kind byte) {
	for b := t.got; len(b) >= 5; {
		kind = b[0]
		b = b[min(len(b), 5+int(binary.BigEndian.Uint16(b[3:]))):]
	}
	return kind
}
