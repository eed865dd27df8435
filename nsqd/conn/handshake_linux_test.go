package conn_test

import (
	"net"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
)

var _ = Describe("a TLS handshake of a connection on an event loop", func() {
	BeforeEach(func() { loops = 2 })
	// promised returns a connection that TLS was granted, and whose handshake has yet to come.
	promised := func(n *secure) *peer {
		GinkgoHelper()
		p := n.dial()
		p.send(wire.AppendIdentify(nil, []byte(`{"feature_negotiation":true,"tls_v1":true}`)))
		p.expect(wire.FrameResponse, ContainSubstring(`"tls_v1":true`))
		return p
	}

	// It ended the process, where the loop noticed the peer's end just before the handshake did.
	It("ends with its peer", func() {
		n := startSecure(nil)
		for range 10 {
			var all []*peer
			for range 100 {
				all = append(all, promised(n))
			}
			for _, p := range all {
				Expect(p.nc.(*net.TCPConn).SetLinger(0)).To(Succeed()) // a reset
				Expect(p.nc.Close()).To(Succeed())
			}
			Eventually(func() int { return n.server.Stats().Connections }).Should(BeZero())
		}
	})
})
