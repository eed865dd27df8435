package conn_test

import (
	"net"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/conn"
)

var _ = Describe("a TLS handshake of a connection on an event loop", func() {
	BeforeEach(func() { loops = 2 })
	// negotiated returns a connection that has negotiated TLS and has not begun its handshake.
	negotiated := func(n *secure) *peer {
		GinkgoHelper()
		p := n.dial()
		p.send(wire.AppendIdentify(nil, []byte(`{"feature_negotiation":true,"tls_v1":true}`)))
		p.expect(wire.FrameResponse, ContainSubstring(`"tls_v1":true`))
		return p
	}

	// The process used to crash if the loop noticed the peer's end just before the handshake did.
	It("ends with its peer", func() {
		n := startSecure(nil)
		for range 10 {
			var all []*peer
			for range 100 {
				all = append(all, negotiated(n))
			}
			for _, p := range all {
				Expect(p.nc.(*net.TCPConn).SetLinger(0)).To(Succeed()) // a reset
				Expect(p.nc.Close()).To(Succeed())
			}
			Eventually(func() int { return n.server.Stats().Connections }).Should(BeZero())
		}
	})

	// Each handshake has a second descriptor. As many handshakes as connections would use twice the reserved number of
	// descriptors.
	It("counts as another connection", func() {
		const limit = 40
		n := startSecure(func(c *conn.Config) { c.MaxConnections = limit })
		var all []*peer
		for range limit {
			all = append(all, n.dial())
		}
		Eventually(func() int { return n.server.Stats().Connections }).Should(Equal(limit))
		for _, p := range all {
			p.send(wire.AppendIdentify(nil, []byte(`{"feature_negotiation":true,"tls_v1":true}`)))
		}
		const few = limit/16 + 1
		Eventually(func() int { return n.server.Stats().Connections }).Should(BeNumerically("<=", limit/2+few))
		Expect(n.server.Stats().Refused).To(BeNumerically(">=", limit/2-few))
	})
})
