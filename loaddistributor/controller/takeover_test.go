package controller_test

import (
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

var _ = Describe("What a broker of a replicated topic had", func() {
	It("is taken over after what the broker has that began with that, and ended", func() {
		var mu sync.Mutex
		var all []string // former brokers, in the order in which their messages were taken over
		var last *srtmv1.TakeOver
		asked := func() []string {
			mu.Lock()
			defer mu.Unlock()
			return append([]string{}, all...)
		}
		begun, never := make(chan struct{}), make(chan struct{})
		replicates := func(take func(from string)) func(*agent.Config) {
			return func(cfg *agent.Config) {
				cfg.Durability = srtmv1.Durability_DURABILITY_REPLICATED
				cfg.TakeOver = func(m *srtmv1.TakeOver) (int, error) {
					mu.Lock()
					last = m
					mu.Unlock()
					take(m.FromBrokerId)
					return 1, nil
				}
			}
		}
		notes := func(from string) {
			mu.Lock()
			defer mu.Unlock()
			all = append(all, from)
		}
		c := newCluster(setup{config: func(cfg *controller.Config) {
			cfg.EvacuateAfter, cfg.TakeOverAfter = 50*time.Millisecond, 100*time.Millisecond
		}})
		atEnd(func() { close(never) }) // before the brokers stop
		b1 := c.join("b1", 150, agenttest.New(), replicates(notes))
		b2 := c.join("b2", 150, agenttest.New(), replicates(func(string) {
			close(begun)
			<-never
		}))
		c.mustCreate(spec("t", 300, 30))
		c.join("b3", 150, agenttest.New(), replicates(notes))
		c.join("b4", 150, agenttest.New(), replicates(notes))
		b1.stop()
		<-begun
		b2.stop()
		Eventually(asked).Should(Equal([]string{"b2", "b1"}))
		Expect(last.Channels).To(HaveExactElements(HaveField("Name", "main")), "the channels of the topic")
		Expect(last.ChannelsVersion).To(BeNumerically(">=", last.Channels[0].Created))
		Expect(last.Identity.GetCreated()).NotTo(BeZero())
		Eventually(func() int { return len(c.topic("t").Status.Brokers) }).Should(Equal(2))
	})

	It("is prepared again where a broker gave it up that has it", func() {
		c := newCluster(setup{})
		node := c.node("b1", 600)
		c.mustCreate(spec("t", 100, 10))
		share := func() int64 { t, _ := node.Topic("t"); return t.Share.Burst }
		Eventually(share).Should(BeEquivalentTo(10))
		Eventually(func() bool { return len(c.topic("t").Status.Brokers) > 0 && c.topic("t").Status.Brokers[0].Last != nil }).Should(BeTrue())
		node.Drop("t")
		Eventually(hasTopic(node, "t")).Should(BeTrue())
		Eventually(share).Should(BeEquivalentTo(10))
	})

	It("is prepared again where it was deleted and created anew between two reports", func() {
		c := newCluster(setup{})
		node := c.node("b1", 600)
		c.mustCreate(spec("t", 100, 10))
		share := func() int64 { t, _ := node.Topic("t"); return t.Share.Burst }
		Eventually(share).Should(BeEquivalentTo(10))
		node.Create("t") // replaces the topic that was there
		Eventually(share).Should(BeEquivalentTo(10), "what the adaptor counts on is in force")
	})
})
