package controller_test

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
	"github.com/srtm-io/srtm/tokenbucket"
)

// counted counts the contracts that an adaptor receives.
type counted struct {
	controller.Adaptor
	contracts *atomic.Int32
}

func (c counted) Set(ctx context.Context, of *adaptor.Contract, mode adaptor.Mode) error {
	c.contracts.Add(1)
	return c.Adaptor.Set(ctx, of, mode)
}

var _ = Describe("A broker whose session ends", func() {
	var c *cluster
	var b1, b2, b3 *broker
	var contracts atomic.Int32
	var rule string
	BeforeEach(func() { rule = "static" })
	var ports sync.Map // by address: "accepts", "refuses", or silence
	const accepts, refuses = "accepts", "refuses"
	begin := func(web string) {
		ports.Clear()
		for _, id := range []string{"b1", "b2", "b3"} {
			ports.Store(id+".example:4150", accepts)
			ports.Store(id+".example:4151", accepts)
		}
		ports.Store("b2.example:4151", web)
		c = newCluster(setup{wrap: func(a controller.Adaptor) controller.Adaptor { return counted{a, &contracts} }, config: func(cfg *controller.Config) {
			cfg.Probe = func(_ context.Context, address string) (bool, bool) {
				is, _ := ports.Load(address)
				return is == accepts, is == refuses
			}
		}})
		b1, b2, b3 = c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New()), c.join("b3", 60, agenttest.New())
		s := spec("t", 100, 10)
		s.ShareRule = rule
		c.mustCreate(s)
		Expect(c.topic("t").Quotas).To(HaveLen(2))
		<-time.After(3 * time.Second) // virtual: leases are renewed
	}
	ends := func(tcp, web string) {
		ports.Store("b2.example:4150", tcp)
		ports.Store("b2.example:4151", web)
		b2.stop()
	}
	on := func() []string {
		var ids []string
		for _, q := range c.topic("t").Quotas {
			ids = append(ids, q.BrokerId)
		}
		return ids
	}
	held := func(brokers ...*broker) (sum tokenbucket.Share) {
		for _, b := range brokers {
			t, _ := b.node.Topic("t")
			sum.Rate += t.Share.Rate
			sum.Burst += t.Share.Burst
		}
		return sum
	}

	It("and whose ports refuse is dead: its share is free, and its publishers are elsewhere, at once", func() {
		begin(accepts)
		ends(refuses, refuses)
		Eventually(on, "1s").Should(Equal([]string{"b1", "b3"}))
		Eventually(func() bool { s := held(b1, b3); return s.Rate >= 98_000 && s.Burst >= 9 }, "1s").Should(BeTrue(), "but for what it gets when it is back, for its messages")
		r, err := c.grants.ListShares(context.Background(), &srtmv1.ListSharesRequest{Topic: "t"})
		Expect(err).NotTo(HaveOccurred())
		Expect(r.Freed).To(Equal([]string{"b2"}))
	})

	It("and is dead has no part in a rule that follows the traffic, and the adaptor does not get the same weights again and again", func() {
		rule = "sqrt"
		begin(accepts)
		ends(refuses, refuses)
		Eventually(on, "1s").Should(Equal([]string{"b1", "b3"}))
		Eventually(func() map[string]string { return c.shares("t") }).Should(HaveLen(2))
		before := contracts.Load()
		<-time.After(10 * time.Second) // virtual
		Expect(contracts.Load()).To(Equal(before))
	})

	It("and is dead a little later is found to be", func() {
		begin(accepts)
		ends(accepts, refuses)
		<-time.After(500 * time.Millisecond) // virtual
		Expect(on()).To(ContainElement("b2"))
		ports.Store("b2.example:4150", refuses)
		Eventually(on, "1s").Should(Equal([]string{"b1", "b3"}))
	})

	It("and is dead on a machine that is busy for a moment is found to be once its ports answer", func() {
		begin(accepts)
		ends("", refuses)
		<-time.After(500 * time.Millisecond) // virtual
		Expect(on()).To(ContainElement("b2"))
		ports.Store("b2.example:4150", refuses)
		Eventually(on, "1s").Should(Equal([]string{"b1", "b3"}))
	})

	for what, ports := range map[string][2]string{
		"is silent":            {"", ""},
		"has one silent port":  {refuses, ""},
		"takes connections":    {accepts, accepts},
		"has one port for all": {refuses, accepts},
	} {
		It("and "+what+" may live: no other broker gets its share before the lease is over", func() {
			begin(accepts)
			ends(ports[0], ports[1])
			<-time.After(10 * time.Second) // virtual
			Expect(on()).To(ContainElement("b2"))
			Expect(c.shares("t")["b2"]).NotTo(Equal("0/0"))
		})
	}

	It("and whose ports were never seen to accept may live, whatever they answer", func() {
		begin(refuses)
		ends(refuses, refuses)
		<-time.After(10 * time.Second) // virtual
		Expect(on()).To(ContainElement("b2"))
		Expect(c.shares("t")["b2"]).NotTo(Equal("0/0"))
		Expect(held(b1, b3).Rate).To(BeEquivalentTo(50_000))
	})
})
