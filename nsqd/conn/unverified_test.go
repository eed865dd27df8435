package conn_test

import (
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// If there is no other place, unauthenticated clients take each other's places. A client that authenticates in time gets
// in and stays.
var _ = overBoth("a storm of unauthenticated clients", func() {
	DescribeTable("keeps no other client out", func(require func(*conn.Config), show func(*secure, *peer)) {
		const limit = 64
		n := startSecure(func(c *conn.Config) {
			c.MaxConnections = limit
			require(c)
		})
		// An evicted client keeps its descriptor for a moment. If more than limit/32 do, the broker refuses other
		// clients. A client of the storm may evict two others: when it connects, and when its handshake begins.
		dial := func() *peer {
			GinkgoHelper()
			Eventually(n.server.EvictedOpen).WithPolling(time.Millisecond).Should(BeZero())
			return n.dial()
		}
		storm := func() {
			GinkgoHelper()
			for range 2 * limit {
				p := dial()
				_, _ = p.nc.Write(wire.AppendIdentify(nil, []byte(`{"feature_negotiation":true,"tls_v1":true}`))) // the broker may have refused p
				_, _ = p.r.ReadByte()                                                                             // the answer, or the end
			}
		}
		publishes := func(p *peer) {
			GinkgoHelper()
			p.send(wire.AppendPub(nil, "t", []byte("x")))
			p.expect(wire.FrameResponse, "OK")
		}
		storm()
		p := dial()
		show(n, p)
		publishes(p)
		storm()
		publishes(p)
		Expect(n.server.Stats().Evicted).To(BeNumerically(">=", 2*limit))
		Eventually(func() int { return n.server.Stats().Connections }).Should(BeNumerically("<=", limit))
	},
		Entry("TLS", func(c *conn.Config) { c.Session.TLSRequired = true }, func(n *secure, p *peer) { p.upgrade(n, wrapping{tls: true}, "") }),
		Entry("AUTH", func(c *conn.Config) {
			auth := new(authServer)
			auth.permits(`"publish"`, ".*", ".*")
			c.Session.AuthRequired, c.Auth = true, auth
		}, func(_ *secure, p *peer) {
			p.identify(wrapping{}, "")
			p.send([]byte("AUTH\n\x00\x00\x00\x06secret"))
			p.expect(wire.FrameResponse, ContainSubstring("permission_count"))
		}),
	)
})
