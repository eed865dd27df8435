package conn_test

import (
	"fmt"
	"io"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

var _ = overBoth("Publishers that belong elsewhere", func() {
	identified := func(n *node, id, topic string) *peer {
		GinkgoHelper()
		p := n.dial()
		p.send(wire.AppendIdentify(nil, fmt.Appendf(nil, `{"client_id":%q,"feature_negotiation":false}`, id)))
		p.expect(wire.FrameResponse, "OK")
		if topic != "" {
			p.send(wire.AppendPub(nil, topic, []byte("x")))
			p.expect(wire.FrameResponse, "OK")
		}
		return p
	}

	It("are released, and no others", func() {
		n := start(nil)
		moved, fresh := identified(n, "p1", "t"), identified(n, "p2", "")
		other, elsewhere, unnamed := identified(n, "p3", "t"), identified(n, "p1", "u"), n.dial()
		sub := identified(n, "p1", "")
		sub.send(wire.AppendSub(nil, "t", "c"))
		sub.expect(wire.FrameResponse, "OK")
		unnamed.send(wire.AppendPub(nil, "t", []byte("x")))
		unnamed.expect(wire.FrameResponse, "OK")

		Expect(n.server.DrainPublishers("t", map[string]bool{"p1": true, "p2": true})).To(Equal(2))
		moved.expectEOF()
		fresh.expectEOF()
		for _, p := range []*peer{other, elsewhere, unnamed} {
			p.send(wire.AppendPub(nil, "v", []byte("still here")))
			p.expect(wire.FrameResponse, "OK")
		}
		again := identified(n, "p1", "t") // the broker serves a later connection
		again.send(wire.AppendPub(nil, "t", []byte("x")))
		again.expect(wire.FrameResponse, "OK")
	})

	It("have every message answered that was accepted", func() {
		n := start(func(b *broker.Config, _ *conn.Config) { b.Capacity = 1 << 20 })
		p := identified(n, "p1", "")
		answeredToTheEnd(n, p, func() {
			Expect(n.server.DrainPublishers("t", map[string]bool{"p1": true})).To(Equal(1))
		})
	})
})

// answeredToTheEnd makes a publisher pipeline messages, calls stop, and expects an OK for each accepted message.
func answeredToTheEnd(n *node, p *peer, stop func()) {
	GinkgoHelper()
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		pub := wire.AppendPub(nil, "t", []byte("x"))
		for { // until the test has read the end of the stream and closes
			if _, err := p.nc.Write(pub); err != nil {
				return
			}
		}
	}()
	answers := 0
	for ; answers < 50; answers++ {
		p.expect(wire.FrameResponse, "OK")
	}
	stop()
	for ; ; answers++ {
		if _, err := p.r.Peek(1); err != nil {
			Expect(err).To(MatchError(io.EOF), "a reset may overtake answers")
			break
		}
		p.expect(wire.FrameResponse, "OK")
	}
	Expect(p.nc.Close()).To(Succeed())
	Eventually(sent).Should(BeClosed())
	topic, err := n.broker.Topic([]byte("t"))
	Expect(err).NotTo(HaveOccurred())
	Expect(topic.Stats().Counters.Accepted).To(BeEquivalentTo(answers))
}
