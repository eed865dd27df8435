package conn_test

import (
	"fmt"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

var _ = overBoth("Consumers that are to look for another broker", func() {
	consumer := func(n *node, agent, topic, channel string) *peer {
		GinkgoHelper()
		p := n.dial()
		p.send(wire.AppendIdentify(nil, fmt.Appendf(nil, `{"client_id":"c","user_agent":%q,"feature_negotiation":false}`, agent)))
		p.expect(wire.FrameResponse, "OK")
		p.send(wire.AppendSub(nil, topic, channel))
		p.expect(wire.FrameResponse, "OK")
		p.send(wire.AppendRdy(nil, 1))
		return p
	}
	publish := func(n *node, body string) {
		GinkgoHelper()
		p := n.dial()
		p.send(wire.AppendPub(nil, "t", []byte(body)))
		p.expect(wire.FrameResponse, "OK")
	}
	only := map[string]bool{"c": true}

	It("are released if they look up at once, and no others", func() {
		n := start(nil)
		asks := []*peer{
			consumer(n, "go-nsq/1.1.0", "t", "c"), consumer(n, "nsq_tail/1.3.0 go-nsq/1.1.0", "t", "c"), consumer(n, "go-nsq/1.1.0", "t", "c"),
		}
		stay := consumer(n, "nsqjs/0.13.0", "t", "c")
		others := []*peer{consumer(n, "go-nsq/1.1.0", "t", "d"), consumer(n, "go-nsq/1.1.0", "u", "c")}
		Expect(n.server.NudgeConsumers("t", only)).To(Equal(3))
		Expect(n.server.NudgeConsumers("v", only)).To(BeZero())
		for _, p := range asks {
			p.expectEOF()
		}
		publish(n, "x")
		for _, p := range []*peer{stay, others[0]} {
			Expect(string(p.message().Body)).To(Equal("x"))
		}
	})

	It("are let go once they hold nothing, and stay if that takes long", func() {
		n := start(nil)
		ready := func() (sum int) {
			for _, c := range n.server.Clients() {
				sum += c.Ready
			}
			return sum
		}
		quick := consumer(n, "go-nsq/1.1.0", "t", "c")
		publish(n, "1")
		first := quick.message()
		Expect(n.server.NudgeConsumers("t", only)).To(Equal(1))
		publish(n, "2")
		Eventually(ready).Should(BeZero())
		quick.send(wire.AppendFin(nil, first.ID))
		quick.expectEOF()

		slow := consumer(n, "go-nsq/1.1.0", "t", "c")
		second := slow.message()
		Expect(string(second.Body)).To(Equal("2"))
		Expect(second.Attempts).To(BeEquivalentTo(1), "no consumer was given it before")
		Expect(n.server.NudgeConsumers("t", only)).To(Equal(1))
		Eventually(ready).Should(BeZero())
		Eventually(ready).Should(Equal(1), "it gets more then")
		slow.send(wire.AppendFin(nil, second.ID))
		publish(n, "3")
		Expect(string(slow.message().Body)).To(Equal("3"))
	})

	It("stay if they have just come", func() {
		n := start(func(_ *broker.Config, c *conn.Config) { c.NudgeAfter = time.Hour })
		p := consumer(n, "go-nsq/1.1.0", "t", "c")
		Expect(n.server.NudgeConsumers("t", only)).To(BeZero())
		publish(n, "x")
		Expect(string(p.message().Body)).To(Equal("x"))
	})

	It("find an ephemeral channel as they left it", func() {
		n := start(nil)
		p := consumer(n, "go-nsq/1.1.0", "t", "c#ephemeral")
		Expect(n.server.NudgeConsumers("t", map[string]bool{"c#ephemeral": true})).To(Equal(1))
		p.expectEOF()
		publish(n, "meanwhile")
		Expect(string(consumer(n, "go-nsq/1.1.0", "t", "c#ephemeral").message().Body)).To(Equal("meanwhile"))
	})
})
