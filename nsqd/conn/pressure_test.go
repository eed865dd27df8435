package conn_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// dialNarrow connects a peer that has little room for unread data.
func (n *node) dialNarrow() *peer {
	GinkgoHelper()
	p := n.dial()
	Expect(p.nc.(*net.TCPConn).SetReadBuffer(64 << 10)).To(Succeed())
	return p
}

var _ = overBoth("a peer that is slow", func() {
	const size = 32 << 10
	body := func(i int) []byte {
		b := bytes.Repeat([]byte{byte(i)}, size)
		binary.BigEndian.PutUint32(b, uint32(i))
		return b
	}

	It("does not hold up publishers, and gets every message, whole and in order", func() {
		n := start(nil)
		sub := n.dialNarrow()
		sub.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 2500))
		sub.expect(wire.FrameResponse, "OK")
		p := n.dial()
		const total = 400 // 13 MB, which no socket buffers take
		for i := range total {
			p.send(wire.AppendPub(nil, "t", body(i)))
			p.expect(wire.FrameResponse, "OK")
		}
		for i := range total {
			m := sub.message()
			Expect(binary.BigEndian.Uint32(m.Body)).To(BeEquivalentTo(i))
			Expect(bytes.Equal(m.Body, body(i))).To(BeTrue(), "message %d is not what was published", i)
			sub.send(wire.AppendFin(nil, m.ID))
		}
		topic, err := n.broker.Topic([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		Eventually(func() uint64 { return topic.Stats().Channels[0].Counters.Finished }).Should(BeEquivalentTo(total))
		Expect(topic.Stats().Delivered).To(BeEquivalentTo(total))
	})

	It("loses its messages to others when it takes nothing for the write timeout", func() {
		n := start(func(_ *broker.Config, c *conn.Config) { c.WriteTimeout = time.Second })
		dead := n.dialNarrow()
		dead.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 2500))
		dead.expect(wire.FrameResponse, "OK")
		p := n.dial()
		const total = 400
		for i := range total {
			p.send(wire.AppendPub(nil, "t", body(i)))
			p.expect(wire.FrameResponse, "OK")
		}
		Eventually(func() int { return n.server.Stats().Connections }).Should(Equal(1), "the dead one is cut")
		other := n.dial()
		other.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 1)) // no more than sockets take, or the peer has to be quick, too
		other.expect(wire.FrameResponse, "OK")
		seen := map[uint32]bool{}
		for range total {
			m := other.message()
			seen[binary.BigEndian.Uint32(m.Body)] = true
			other.send(wire.AppendFin(nil, m.ID))
		}
		Expect(seen).To(HaveLen(total))
	})

	It("is not read from while it does not read its answers", func() {
		n := start(func(b *broker.Config, _ *conn.Config) { b.Capacity = 10 })
		p := n.dialNarrow()
		topic := strings.Repeat("t", 64) // refusals contain the name
		var pubs []byte
		const total, batch = 60_000, 20 // 6 MB of refusals, which no socket buffers take
		for range batch {
			pubs = wire.AppendPub(pubs, topic, make([]byte, 1000))
		}
		var sent atomic.Int64
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range total / batch {
				if _, err := p.nc.Write(pubs); err != nil {
					return
				}
				sent.Add(batch)
			}
		}()
		Eventually(func() bool {
			before := sent.Load()
			Consistently(done, "100ms").ShouldNot(BeClosed(), "the broker reads on and on")
			return before == sent.Load()
		}).Should(BeTrue())
		refused, accepted := 0, 0
		for refused+accepted < total {
			switch kind, data := p.frame(); {
			case kind == wire.FrameError:
				refused++
			case data != wire.Heartbeat: // a slow run has some heartbeats
				accepted++
			}
		}
		Expect(accepted).To(Equal(10))
		Eventually(done).Should(BeClosed())
	})

	It("is cut at the end, with what it was not sent", func() {
		n := start(nil)
		sub := n.dialNarrow()
		sub.send(wire.AppendRdy(wire.AppendSub(nil, "t", "c"), 2500))
		sub.expect(wire.FrameResponse, "OK")
		p := n.dial()
		for i := range 400 {
			p.send(wire.AppendPub(nil, "t", body(i)))
			p.expect(wire.FrameResponse, "OK")
		}
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		Expect(n.server.Shutdown(ctx)).To(MatchError(context.DeadlineExceeded))
		Expect(n.server.Stats().Connections).To(BeZero())
	})

	It("can send a command byte by byte while others are served", func() {
		n := start(nil)
		slow := n.dial()
		fast := n.dial()
		for _, b := range wire.AppendPub(nil, "t", []byte("slow")) {
			slow.send([]byte{b})
			fast.send(wire.AppendPub(nil, "t", []byte("fast")))
			fast.expect(wire.FrameResponse, "OK")
		}
		slow.expect(wire.FrameResponse, "OK")
	})

	It("may hang up in the middle of a command, or reset", func() {
		n := start(nil)
		for i := range 40 {
			p := n.dial()
			p.send(wire.AppendPub(nil, "t", make([]byte, 10_000))[:9_000])
			if i%2 == 0 {
				Expect(p.nc.(*net.TCPConn).SetLinger(0)).To(Succeed())
			}
			Expect(p.nc.Close()).To(Succeed())
		}
		Eventually(func() int { return n.server.Stats().Connections }).Should(BeZero())
	})
})

var _ = overBoth("many connections", func() {
	It("are all accepted in a storm, and cost no goroutine on a loop", func() {
		n := start(nil)
		n.dial().send(wire.AppendNop(nil))
		Eventually(func() int { return n.server.Stats().Connections }).Should(Equal(1))
		before := runtime.NumGoroutine()
		const total = 300
		peers := make([]*peer, total)
		for i := range peers {
			peers[i] = n.dial()
		}
		for i, p := range peers {
			p.send(wire.AppendPub(nil, "t", fmt.Append(nil, i)))
		}
		for _, p := range peers {
			p.expect(wire.FrameResponse, "OK")
		}
		Expect(n.server.Stats().Connections).To(Equal(total + 1))
		if loops > 0 {
			// Topics have their own goroutines, and offloaded operations may be ending.
			Eventually(runtime.NumGoroutine).Should(BeNumerically("<", before+total/10))
		}
	})
})

var _ = Describe("a connection that leaves its loop", func() {
	BeforeEach(func() {
		if runtime.GOOS != "linux" {
			Skip("event loops need Linux")
		}
		loops = 1
	})

	It("gets the answers to its earlier commands, and continues in the new wrapping", func() {
		n := start(func(_ *broker.Config, c *conn.Config) { c.Session.Deflate = true })
		p := n.dial()
		var in []byte
		for range 500 {
			in = wire.AppendPub(in, "t", make([]byte, 100))
		}
		p.send(wire.AppendIdentify(in, []byte(`{"feature_negotiation":true,"deflate":true,"deflate_level":6}`)))
		for range 500 {
			p.expect(wire.FrameResponse, "OK")
		}
		p.expect(wire.FrameResponse, ContainSubstring(`"deflate":true`))
		topic, err := n.broker.Topic([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		Expect(topic.Stats().Publishers).To(Equal(1), "it is still the same publisher")
		Expect(n.server.Clients()).To(HaveLen(1))
		Expect(n.server.Clients()[0].Published).To(Equal([]conn.PubCount{{Topic: "t", Count: 500}}))
	})

	It("leaves for strict buffering when it subscribes, with the commands behind SUB", func() {
		n := start(func(_ *broker.Config, c *conn.Config) { c.StrictBuffering = true })
		p := n.dial()
		in := wire.AppendPub(nil, "t", []byte("x"))
		in = wire.AppendRdy(wire.AppendSub(in, "t", "c"), 1)
		p.send(in)
		p.expect(wire.FrameResponse, "OK")
		p.expect(wire.FrameResponse, "OK")
		p.send(wire.AppendFin(nil, p.message().ID))
		topic, err := n.broker.Topic([]byte("t"))
		Expect(err).NotTo(HaveOccurred())
		Eventually(func() uint64 { return topic.Stats().Channels[0].Counters.Finished }).Should(BeEquivalentTo(1))
	})
})
