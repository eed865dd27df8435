package conn_test

import (
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/pacing/header"
	"github.com/srtm-io/srtm/tokenbucket"
)

var _ = overBoth("pacing", func() {
	// answers floods the topic until its publishers are paced. It then returns the answers to publishes, alone and
	// together.
	answers := func(n *node, p *peer) (all []string) {
		t, err := n.broker.CreateTopic("t")
		Expect(err).NotTo(HaveOccurred())
		Expect(t.CreateChannel("c")).To(Succeed())
		t.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(100), Burst: 1}, false)
		publish := func(times int) {
			var in []byte
			for range times {
				in = wire.AppendPub(in, "t", []byte("x"))
			}
			p.send(in)
			for range times {
				kind, text := p.frame()
				Expect(kind).To(Equal(wire.FrameResponse))
				all = append(all, text)
			}
		}
		for end := time.Now().Add(testkit.Hang); !t.Paced(false).Paced && time.Now().Before(end); {
			publish(1)
			publish(20)
		}
		Expect(t.Paced(false).Paced).To(BeTrue())
		publish(1)
		return all
	}
	paces := func(b *broker.Config, c *conn.Config) {
		b.Pacing, b.MaxWeight, b.Capacity = broker.PaceAdvise, 4, 1_000_000
		c.Session.Limits.Pace = true
	}

	It("advises publishers that requested it, once an interval", func() {
		n := start(paces)
		p := n.dial()
		p.send(wire.AppendPace(nil, 10))
		p.expect(wire.FrameResponse, "OK")
		long := 0
		for _, a := range answers(n, p) {
			if a != "OK" {
				ok, err := header.ParseOK([]byte(a))
				Expect(err).NotTo(HaveOccurred())
				Expect(ok.Weight).To(BeEquivalentTo(4), "what it may have")
				Expect(ok.Paced).To(BeTrue())
				Expect(ok.Rate).To(BeNumerically(">", 0))
				long++
			}
		}
		Expect(long).To(BeNumerically(">=", 1))
	})

	It("sends to others what it always did", func() {
		n := start(paces)
		Expect(answers(n, n.dial())).To(HaveEach("OK"))
	})

	It("refuses under police, and keeps the connection", func() {
		n := start(func(b *broker.Config, c *conn.Config) {
			paces(b, c)
			b.Pacing = broker.PacePolice
		})
		p := n.dial()
		_ = answers(n, p)
		Eventually(func() string {
			p.send(wire.AppendMpub(nil, "t", make2D(500)))
			_, text := p.frame()
			return text
		}).Should(HavePrefix("E_RATE_LIMITED retry_after_ms="))
		p.send(wire.AppendPub(nil, "other", []byte("x")))
		p.expect(wire.FrameResponse, "OK")
	})
})

func make2D(n int) (bodies [][]byte) {
	for range n {
		bodies = append(bodies, []byte("x"))
	}
	return bodies
}
