package controller_test

import (
	"context"
	"slices"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

// moved returns the number of remembered moves of a topic for each reason. It checks that no publisher
// was moved twice at a time, or to the broker where it was.
func (c *cluster) moved(name string) map[srtmv1.MoveReason]int {
	GinkgoHelper()
	r, err := c.admin.ListPublisherMoves(context.Background(), &srtmv1.ListPublisherMovesRequest{Topic: name, PageSize: 1000})
	Expect(err).NotTo(HaveOccurred())
	type key struct {
		epoch     uint64
		publisher string
	}
	seen, reasons := map[key]bool{}, map[srtmv1.MoveReason]int{}
	for _, m := range r.Moves {
		Expect(m.From).NotTo(Equal(m.To), "%v", m)
		Expect(m.Why).NotTo(BeEmpty(), "%v", m)
		k := key{m.Epoch, m.PublisherId}
		Expect(seen[k]).To(BeFalse(), "twice: %v", m)
		seen[k] = true
		reasons[m.Reason]++
	}
	return reasons
}

var _ = Describe("The moves of a topic's publishers", func() {
	page := func(c *cluster, size int32, token string) *srtmv1.ListPublisherMovesResponse {
		GinkgoHelper()
		r, err := c.admin.ListPublisherMoves(context.Background(), &srtmv1.ListPublisherMovesRequest{Topic: "t", PageSize: size, PageToken: token})
		Expect(err).NotTo(HaveOccurred())
		return r
	}

	It("report who, from where to where, why, and by whom", func() {
		c := newCluster(setup{config: func(cfg *controller.Config) { cfg.EvacuateAfter = 100 * time.Millisecond }})
		c.join("b1", 600, agenttest.New())
		c.mustCreate(spec("t", 4, 10))
		Expect(page(c, 0, "").Moves).To(BeEmpty(), "to be placed is no move")
		b2 := c.join("b2", 600, agenttest.New())

		c.mustMove("t", "b2", "g.1")
		one := page(c, 0, "").Moves
		Expect(one).To(HaveLen(1))
		Expect(one[0]).To(And(
			HaveField("PublisherId", "g.1"), HaveField("From", "b1"), HaveField("To", "b2"),
			HaveField("Reason", srtmv1.MoveReason_MOVE_REASON_OPERATOR), HaveField("By", HavePrefix("anonymous at ")),
			HaveField("Epoch", c.topic("t").Epoch), HaveField("Time.IsValid()", true),
		))
		newest := func() *srtmv1.PublisherMove { return page(c, 1, "").Moves[0] }
		c.mustUpdate(spec("t", 3, 10))
		Expect(newest()).To(And(HaveField("Reason", srtmv1.MoveReason_MOVE_REASON_CONTRACT_CHANGE), HaveField("By", HavePrefix("anonymous at ")), HaveField("To", "")))
		c.drain("b1")
		Eventually(newest).Should(HaveField("Reason", srtmv1.MoveReason_MOVE_REASON_DRAIN))
		Expect(newest()).To(And(HaveField("By", HavePrefix("anonymous at ")), HaveField("Why", "broker b1 drains"), HaveField("To", "b2")))
		c.join("b3", 600, agenttest.New())
		b2.stop()
		Eventually(newest).Should(HaveField("Reason", srtmv1.MoveReason_MOVE_REASON_CRASH))
		Expect(newest()).To(And(HaveField("By", ""), HaveField("To", "b3")))
		shown := c.topic("t").Status.Moves
		Expect(shown).To(HaveLen(len(page(c, 0, "").Moves)))

		c.mustDelete("t")
		Expect(c.admin.ListPublisherMoves(context.Background(), &srtmv1.ListPublisherMovesRequest{Topic: "t"})).Error().To(failsWith(codes.NotFound))
	})

	It("come in pages, and the oldest are forgotten", func() {
		c := newCluster(setup{})
		c.join("b1", 6000, agenttest.New())
		c.mustCreate(spec("t", 700, 10))
		c.join("b2", 6000, agenttest.New())
		topic, err := c.control.View().Topic("t")
		Expect(err).NotTo(HaveOccurred())
		var ids []string
		for i := range 700 {
			ids = append(ids, topic.Placement.At(i).Publisher)
		}
		c.mustMove("t", "b2", ids...)
		c.mustMove("t", "b1", ids...)
		var got []*srtmv1.PublisherMove
		for token := ""; ; {
			p := page(c, 300, token)
			Expect(p.Forgotten).To(BeEquivalentTo(400))
			got = append(got, p.Moves...)
			if token = p.NextPageToken; token == "" {
				break
			}
		}
		Expect(got).To(HaveLen(1000))
		slices.Reverse(ids)
		for i, m := range got {
			Expect(m.PublisherId).To(Equal(ids[i%700]))
			Expect(m.To).To(Equal(map[bool]string{true: "b1", false: "b2"}[i < 700]))
		}
		Expect(c.topic("t").Status.Moves).To(HaveLen(20))
		for _, bad := range []*srtmv1.ListPublisherMovesRequest{{Topic: "t", PageSize: -1}, {Topic: "t", PageSize: 1001}, {Topic: "t", PageToken: "?"}, {Topic: "t", PageToken: "0"}} {
			Expect(c.admin.ListPublisherMoves(context.Background(), bad)).Error().To(failsWith(codes.InvalidArgument))
		}
		Expect(page(c, 1, "zzzzzz").Moves).To(HaveLen(1), "a token of before a restart begins anew")
		Expect(page(c, 1, "1").Moves).To(BeEmpty())
	})
})
