package conn_test

import (
	"net"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// A client that sends half a message and stops occupies the message's buffer for an unlimited time.
var _ = overBoth("messages that do not come whole", func() {
	const most, size = 1 << 20, 100_000

	It("take so much memory, and then the one ends that was begun first", func() {
		n := start(func(_ *broker.Config, c *conn.Config) { c.MaxBodies = most })
		whole := wire.AppendPub(nil, "t", make([]byte, size))
		half := wire.AppendPub(nil, "t", make([]byte, 9*size))[:size]
		good := n.dial()
		var halves []*peer
		var each int64 // bytes that half a message takes
		for i := range 40 {
			p := n.dial()
			p.send(half)
			halves = append(halves, p)
			// Each half is counted, or its connection was ended and has released its bytes. Beyond twice the bound, the
			// newest connection would end.
			if each == 0 {
				Eventually(n.server.Bodies).Should(BeNumerically(">=", size))
				each = n.server.Bodies()
			}
			Eventually(func() int64 {
				held := n.server.Bodies()
				if held > most {
					return 0
				}
				return int64(n.server.Stats().MemoryShort) + held/each
			}).Should(BeNumerically(">", i))
			good.send(whole)
			good.expect(wire.FrameResponse, "OK")
			Expect(n.server.Bodies()).To(BeNumerically("<=", 2*most))
		}
		halves[0].expect(wire.FrameError, HavePrefix("E_PUB_FAILED"))
		Eventually(func() uint64 { return n.server.Stats().MemoryShort }).Should(BeNumerically(">=", 40-most/size))
		Eventually(n.server.Bodies).Should(BeNumerically("<=", most))
		last := halves[len(halves)-1] // has no deadline
		last.send(wire.AppendPub(nil, "t", make([]byte, 9*size))[size:])
		last.expect(wire.FrameResponse, "OK")
		for _, p := range append(halves, good) {
			Expect(p.nc.Close()).To(Succeed())
		}
		Eventually(n.server.Bodies).Should(BeZero())
	})

	It("may be larger than that if there is no other", func() {
		n := start(func(_ *broker.Config, c *conn.Config) { c.MaxBodies = size })
		p := n.dial()
		for range 3 {
			p.send(wire.AppendPub(nil, "t", make([]byte, 9*size)))
			p.expect(wire.FrameResponse, "OK")
		}
		Expect(p.nc.(*net.TCPConn).SetLinger(0)).To(Succeed())
		p.send(wire.AppendPub(nil, "t", make([]byte, 9*size))[:size])
		Expect(p.nc.Close()).To(Succeed())
		Eventually(n.server.Bodies).Should(BeZero())
	})
})
