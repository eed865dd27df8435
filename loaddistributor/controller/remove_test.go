package controller_test

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/store"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
	"github.com/srtm-io/srtm/tokenbucket"
)

var _ = Describe("A dead broker", func() {
	var data *store.Memory
	var c *cluster
	soon := func(cfg *controller.Config) { cfg.EvacuateAfter = 200 * time.Millisecond }
	begin := func(address string) {
		c = newCluster(setup{data: data, address: address, config: soon})
	}
	restart := func() {
		address := c.address
		c.stop()
		begin(address)
	}
	held := func(brokers ...*broker) (sum tokenbucket.Share) {
		for _, b := range brokers {
			t, _ := b.node.Topic("t")
			sum.Rate += t.Share.Rate
			sum.Burst += t.Share.Burst
		}
		return sum
	}
	all := tokenbucket.Share{Rate: 100_000, Burst: 10}
	remove := func(id string) (*srtmv1.RemoveBrokerResponse, error) {
		return c.admin.RemoveBroker(context.Background(), &srtmv1.RemoveBrokerRequest{BrokerId: id})
	}
	refused := func(code codes.Code, reason string) OmegaMatcher {
		return WithTransform(func(err error) string { return status.Code(err).String() + " " + service.Reason(err) }, Equal(code.String()+" "+reason))
	}
	BeforeEach(func() { data = &store.Memory{} })

	It("is removed with what it held, and restarts bring nothing of it back", func() {
		begin("")
		b1, b2, b3 := c.join("b1", 60, agenttest.New()), c.join("b2", 60, agenttest.New()), c.join("b3", 60, agenttest.New())
		c.mustCreate(spec("t", 100, 10))
		Expect(remove("b2")).Error().To(refused(codes.FailedPrecondition, "BROKER_CONNECTED"))
		Expect(remove("nobody")).Error().To(refused(codes.NotFound, "BROKER_UNKNOWN"))
		b2.stop()
		Eventually(func() bool { return c.broker("b2").Connected }).Should(BeFalse())
		Expect(remove("b2")).Error().To(refused(codes.FailedPrecondition, "BROKER_IN_USE"))
		Eventually(func() []string { return c.broker("b2").Topics }).Should(Equal([]string{"t"}), "it may have messages")
		Eventually(func() int { return len(c.topic("t").Quotas) }).Should(Equal(2))
		c.drain("b2")
		Eventually(func() string { return c.broker("b2").GetWaits()[0].GetRemedy() }).Should(
			Equal("start the broker again, or `srtm broker remove b2` if the broker will not return: its messages are lost then"))
		Eventually(func() error { _, err := remove("b2"); return err }).Should(Succeed())
		Eventually(c.state("t")).Should(Equal("ACTIVE"))
		Eventually(func() tokenbucket.Share { return held(b1, b3) }).Should(Equal(all))

		for range 2 {
			restart()
			Eventually(func() map[string]string { return c.shares("t") }).Should(HaveLen(2), "it is not waited for")
			Eventually(c.state("t")).Should(Equal("ACTIVE"))
			Expect(held(b1, b3)).To(Equal(all))
			for _, b := range c.brokers() {
				Expect(b.Id).NotTo(Equal("b2"))
			}
		}
	})

	It("that comes back while it is removed learns of the removal: nothing that it holds is forgotten before", func() {
		c = newCluster(setup{config: soon, wrap: func(a controller.Adaptor) controller.Adaptor {
			return forgetting{a, func() {
				c.arrive("b2", 60, agenttest.New())
				<-time.After(time.Second) // virtual
			}}
		}})
		c.join("b1", 60, agenttest.New())
		b2 := c.join("b2", 60, agenttest.New())
		c.join("b3", 60, agenttest.New())
		c.mustCreate(spec("t", 100, 10))
		b2.stop()
		Eventually(func() int { return len(c.topic("t").Quotas) }).Should(Equal(2))
		Eventually(func() []string { return c.broker("b2").Topics }).Should(Equal([]string{"t"}), "it may have messages")
		Eventually(c.state("t")).Should(Equal("ACTIVE"))
		Eventually(func() error { _, err := remove("b2"); return err }).Should(Succeed(), "once it has been seen to be gone, and the topic has moved")
		Expect(c.broker("b2")).To(BeNil())
		Eventually(func() bool { return c.broker("b2").GetConnected() }, "30s").Should(BeTrue(), "as a new one")
	})

	It("that was removed and lives learns of the removal, gives up what it holds, and joins anew", func() {
		begin("")
		c.join("b1", 60, agenttest.New())
		disk, err := agent.OpenFiles(GinkgoT().TempDir())
		Expect(err).NotTo(HaveOccurred())
		b2 := c.join("b2", 60, agenttest.New(), func(cfg *agent.Config) { cfg.Store = disk })
		c.mustCreate(spec("t", 100, 10))
		Expect(disk.Load()).To(HaveLen(1))
		// The broker is cut off: the next leader receives nothing from it.
		address := c.address
		c.stop()
		c = newCluster(setup{data: data, address: "127.0.0.1:9999", config: soon})
		c.join("b1", 60, agenttest.New())
		c.join("b3", 60, agenttest.New())
		Eventually(func() string { _, err := remove("b2"); return status.Convert(err).Message() }).Should(BeEmpty())
		Expect(held(b2)).To(Equal(tokenbucket.Share{Rate: 50_000, Burst: 5}), "it does not know of the removal")
		c.stop()

		begin(address)
		Eventually(func() tokenbucket.Share { return held(b2) }, "30s").Should(BeZero())
		Expect(disk.Load()).To(BeEmpty())
		Eventually(func() []string {
			var ids []string
			for _, b := range c.brokers() {
				if b.Connected {
					ids = append(ids, b.Id)
				}
			}
			return ids
		}, "30s").Should(ContainElement("b2"), "as a new one")
	})

	It("that was forgotten stays so when the adaptor restarts: its topics do not wait for it", func() {
		begin("")
		b1 := c.join("b1", 60, agenttest.New())
		b2 := c.join("b2", 60, agenttest.New())
		s := spec("t", 100, 10)
		s.ShareRule = "proportional"
		c.mustCreate(s)
		b2.stop()
		Eventually(func() bool { return c.broker("b2").Connected }).Should(BeFalse())
		Eventually(func() error {
			_, err := c.grants.ForgetBroker(context.Background(), &srtmv1.ForgetBrokerRequest{BrokerId: "b2"})
			return err
		}).Should(Succeed())
		Eventually(func() tokenbucket.Share { return held(b1) }).Should(Equal(all), "no other broker can take the topic")
		<-time.After(100 * time.Millisecond) // virtual
		restart()
		Eventually(func() []string { return c.adopting("t") }).Should(Equal([]string{"b2"}))
		Eventually(func() []string { return c.adopting("t") }).Should(BeEmpty())
		Eventually(func() map[string]string { return c.shares("t") }).Should(HaveKeyWithValue("b1", "100000/10"))
		// After its return the broker is a normal member.
		again := c.join("b2", 60, agenttest.New(), instance("again"))
		Eventually(func() bool { return held(again).Rate > 0 && held(b1, again) == all }).Should(BeTrue())
	})

	It("that is strict is not waited for longer than its lease, after a restart too", func() {
		begin("")
		c.join("b1", 60, agenttest.New())
		b2 := c.join("b2", 60, agenttest.New(), func(cfg *agent.Config) { cfg.Policy = agent.Strict })
		c.mustCreate(spec("t", 100, 10))
		<-time.After(100 * time.Millisecond) // virtual
		b2.stop()
		restart()
		Eventually(func() []string { return c.adopting("t") }).Should(Equal([]string{"b2"}))
		<-time.After(20 * time.Second) // virtual
		Expect(c.adopting("t")).To(Equal([]string{"b2"}))
		Eventually(func() []string { return c.adopting("t") }, "15s").Should(BeEmpty())
	})
})

// forgetting is an adaptor that calls then after it has forgotten a broker.
type forgetting struct {
	controller.Adaptor
	then func()
}

func (f forgetting) Forget(ctx context.Context, broker string) ([]*srtmv1.FreedShare, error) {
	defer f.then()
	return f.Adaptor.Forget(ctx, broker)
}

// adopting returns the brokers that the topic's shares wait for.
func (c *cluster) adopting(topic string) []string {
	GinkgoHelper()
	r, err := c.grants.ListShares(context.Background(), &srtmv1.ListSharesRequest{Topic: topic})
	Expect(err).NotTo(HaveOccurred())
	var ids []string
	for _, t := range r.Topics {
		ids = append(ids, t.Awaited...)
	}
	return ids
}
