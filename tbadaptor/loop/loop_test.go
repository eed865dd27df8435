package loop_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/loop"
	"github.com/srtm-io/srtm/tbadaptor/share"
)

var ctx = context.Background()

var _ = Describe("SetContract", func() {
	It("returns when every member has acknowledged its share, and gives the first burst away", func() {
		a := newAdaptor(config())
		b1, b2 := a.join("b1", "i"), a.join("b2", "i")
		done := a.set(ctx, contract("t", 100_000, 10, members("b1", 60_000, 6, "b2", 40_000, 4)))
		g1, g2 := b1.granted(), b2.granted()
		Expect(g1.Share.RateMilli).To(BeEquivalentTo(60_000))
		Expect(g1.TokensMilli).To(BeEquivalentTo(6000))
		Expect(g2.TokensMilli).To(BeEquivalentTo(4000))
		Expect(g1.Epoch).NotTo(Equal(g2.Epoch))
		b1.ack(g1, 0)
		Consistently(done, "10ms").ShouldNot(Receive())
		b2.ack(g2, 0)
		Eventually(done).Should(Receive(BeNil()))

		Expect(<-a.set(ctx, contract("t", 100_000, 10, members("b1", 60_000, 6, "b2", 40_000, 4)))).To(Succeed(), "a repetition is harmless")
		Consistently(b1.grants, "10ms").ShouldNot(Receive())
		Eventually(a.set(ctx, contract("t", 200_000, 10, members("b1", 200_000, 10)))).Should(
			Receive(fails(codes.FailedPrecondition, loop.ReasonConflict)))
	})

	It("waits for members that are on their way", func() {
		a := newAdaptor(config())
		done := a.set(ctx, contract("t", 100_000, 10, members("b1", 100_000, 10)))
		b1 := a.join("b1", "i")
		b1.ack(b1.granted(), 0)
		Eventually(done).Should(Receive(BeNil()))
	})

	It("fails when a member does not acknowledge, and leaves nothing behind", func() {
		cfg := config()
		cfg.AckTimeout = 500 * time.Millisecond
		a := newAdaptor(cfg)
		b1, b2 := a.join("b1", "i"), a.join("b2", "i")
		err := <-a.set(ctx, contract("t", 100_000, 10, members("b1", 50_000, 5, "b2", 40_000, 4, "b3", 10_000, 1)))
		Expect(err).To(fails(codes.Unavailable, loop.ReasonUnsettled))
		Expect(err).To(MatchError(ContainSubstring("b1, b2, b3 (not connected)")))
		// A grant is withdrawn once the adaptor knows that the grant is in force.
		for _, n := range []*node{b1, b2} {
			first := n.granted()
			n.ack(first, 0)
			second := n.granted()
			Expect(second.Share.RateMilli).To(BeZero())
			n.ack(second, first.TokensMilli)
		}
		Eventually(func() []string { return names(a) }).Should(BeEmpty())
		b1.accept()
		Eventually(func() error { // b1 may be too slow at first
			return <-a.set(ctx, contract("t", 70_000, 3, members("b1", 70_000, 3)))
		}).Should(Succeed())
	})

	It("answers before its caller gives up", func() {
		a := newAdaptor(config())
		patience := time.Second
		Eventually(func() error {
			short, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			patience *= 2 // the answer had too little time to arrive
			return <-a.set(short, contract("t", 100_000, 10, members("b1", 100_000, 10)))
		}).Should(fails(codes.Unavailable, loop.ReasonUnsettled))
	})

	It("waits for the shares of a removed contract of that name", func() {
		a := newAdaptor(config())
		b1 := a.join("b1", "i")
		done := a.set(ctx, contract("t", 100_000, 10, members("b1", 100_000, 10)))
		b1.ack(b1.granted(), 0)
		Expect(<-done).To(Succeed())
		_, err := a.client.RemoveContract(ctx, &srtmv1.RemoveContractRequest{Topic: "t"})
		Expect(err).NotTo(HaveOccurred())
		Expect(names(a)).To(BeEmpty())
		second := a.set(ctx, contract("t", 30_000, 3, members("b1", 30_000, 3)))
		empty := b1.granted()
		Expect(empty.Share.RateMilli).To(BeZero())
		Consistently(b1.grants, "10ms").ShouldNot(Receive(), "it may still be using the old share")
		b1.ack(empty, 10_000)
		b1.ack(b1.granted(), 0)
		Expect(<-second).To(Succeed())

		b1.leave()
		Eventually(func() []string { return a.server.State().Connected }).Should(BeEmpty())
		_, err = a.client.RemoveContract(ctx, &srtmv1.RemoveContractRequest{Topic: "t"})
		Expect(err).NotTo(HaveOccurred())
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		_, err = a.server.SetContract(short, contract("t", 30_000, 3, members("b1", 30_000, 3)))
		Expect(err).To(fails(codes.Unavailable, loop.ReasonBusy))
		Expect(err).To(MatchError(ContainSubstring("b1")))
	})

	It("waits for the holders of a contract that an earlier adaptor removed", func() {
		a := newAdaptor(config())
		b1 := a.join("b1", "i")
		req := contract("t", 100_000, 10, members("b1", 100_000, 10))
		req.Holders = []string{"b1", "b2"}
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		_, err := a.server.SetContract(short, req)
		Expect(err).To(fails(codes.Unavailable, loop.ReasonBusy))
		Expect(err).To(MatchError(ContainSubstring("b2")))
		Consistently(b1.grants, "10ms").ShouldNot(Receive(), "b2 may still be using its share")
		done := a.set(ctx, req)
		b2 := a.join("b2", "i", heldShare("t", 70, 60_000, 6))
		withdrawn := b2.granted()
		Expect(withdrawn.Share.GetRateMilli()).To(BeZero())
		Consistently(b1.grants, "10ms").ShouldNot(Receive(), "before b2 has given up its share")
		b2.ack(withdrawn, 0)
		b1.ack(b1.granted(), 0)
		Expect(<-done).To(Succeed())
		Expect(<-a.set(ctx, req)).To(Succeed(), "a repetition removes nothing")
		Consistently(b1.grants, "10ms").ShouldNot(Receive())
	})

	It("ends when the contract is removed meanwhile, or the adaptor stops", func() {
		a := newAdaptor(config())
		a.join("b1", "i")
		done := a.set(ctx, contract("t", 100_000, 10, members("b1", 100_000, 10)))
		Eventually(func() []string { return names(a) }).Should(Equal([]string{"t"}))
		_, err := a.client.RemoveContract(ctx, &srtmv1.RemoveContractRequest{Topic: "t"})
		Expect(err).NotTo(HaveOccurred())
		Eventually(done).Should(Receive(fails(codes.Aborted, loop.ReasonRemoved)))
		waiting := a.set(ctx, contract("u", 100_000, 10, members("b9", 100_000, 10)))
		Eventually(func() []string { return names(a) }).Should(Equal([]string{"u"}))
		a.stop()
		Eventually(waiting).Should(Receive(fails(codes.Unavailable, loop.ReasonClosing)))
	})

	It("refuses a request with all its faults, and changes nothing", func() {
		a := newAdaptor(config())
		req := contract("no such name!", 100_000, 10, members("b1", 60_000, 6, "b1", 30_000, 3, "b 2", 0, 0, "b3", -1, 1))
		req.ShareRule = "favourites"
		err := <-a.set(ctx, req)
		Expect(err).To(fails(codes.InvalidArgument, loop.ReasonBadRequest))
		Expect(violations(err)).To(Equal([]string{
			"topic", "share_rule", "members[1].broker_id", "members[2].broker_id", "members[2].share", "members[3].share",
		}))
		Expect(violations(<-a.set(ctx, &srtmv1.SetContractRequest{Topic: "t"}))).To(Equal([]string{"contract", "members"}))
		Expect(violations(<-a.set(ctx, contract("t", 100_000, 0, members("b1", 100_000, 1))))).To(Equal([]string{"contract"}))
		Expect(violations(<-a.set(ctx, contract("t", 100_000, 10, members("b1", 90_000, 10))))).To(Equal([]string{"members"}))
		Expect(violations(<-a.set(ctx, contract("t", 100_000, 10, members("b1", 100_000, 11))))).To(Equal([]string{"members"}))
		Expect(names(a)).To(BeEmpty())
	})
})

var _ = Describe("A session", func() {
	hello := func(n *node, h *srtmv1.NodeHello) {
		n.send(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Hello{Hello: h}})
	}

	It("begins with one good hello", func() {
		a := newAdaptor(config())
		n := a.open()
		n.send(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Report{Report: &srtmv1.NodeReport{}}})
		Eventually(n.ended).Should(Receive(fails(codes.InvalidArgument, loop.ReasonBadRequest)))

		n = a.open()
		hello(n, &srtmv1.NodeHello{BrokerId: "b 1", Held: []*srtmv1.HeldShare{
			heldShare("t", 1, 10, 1), heldShare("t", 0, 10, 0), heldShare("", 1, 0, 0),
		}})
		var err error
		Eventually(n.ended).Should(Receive(&err))
		Expect(violations(err)).To(Equal([]string{
			"hello.broker_id", "hello.instance", "hello.held[1].topic", "hello.held[1].share", "hello.held[1].epoch", "hello.held[2].topic",
		}))
		Expect(a.server.State().Connected).To(BeEmpty())

		n = a.join("b1", "i")
		hello(n, &srtmv1.NodeHello{BrokerId: "b1", Instance: "i"})
		Eventually(n.ended).Should(Receive(fails(codes.InvalidArgument, loop.ReasonBadRequest)))
	})

	It("is replaced by a process with the lock of the same data folder, and an older process cannot take it back", func() {
		a := newAdaptor(config())
		first := a.join("b1", "one")
		second := a.join("b1", "two")
		Eventually(first.ended).Should(Receive(fails(codes.Aborted, loop.ReasonReplaced)))
		Expect(a.server.State().Connected).To(Equal([]string{"b1"}), "the end of the first did not end the second")
		third := a.open()
		hello(third, &srtmv1.NodeHello{BrokerId: "b1", Instance: "one"})
		Eventually(third.ended).Should(Receive(fails(codes.Aborted, identity.ReasonLost)))
		Consistently(second.ended, "10ms").ShouldNot(Receive())
	})

	It("refuses another process while the first one has its session, and names both", func() {
		cfg := config()
		log := new(testkit.Buffer)
		cfg.Log = slog.New(slog.NewTextHandler(log, nil))
		a := newAdaptor(cfg)
		first := a.open()
		hello(first, &srtmv1.NodeHello{BrokerId: "b1", Instance: "one", TcpAddress: "h1:4150", Hostname: "h1", DataPath: "/one", Lock: "L1"})
		Eventually(func() []string { return a.server.State().Connected }).Should(ContainElement("b1"))
		for range 2 {
			second := a.open()
			hello(second, &srtmv1.NodeHello{BrokerId: "b1", Instance: "two", TcpAddress: "h2:4150", Hostname: "h2", DataPath: "/two", Lock: "L2"})
			var err error
			Eventually(second.ended).Should(Receive(&err))
			Expect(err).To(fails(codes.AlreadyExists, identity.ReasonInUse))
			Expect(err).To(MatchError(And(ContainSubstring("h1:4150"), ContainSubstring("/one"), ContainSubstring("h2:4150"), ContainSubstring("/two"))))
		}
		Consistently(first.ended, "10ms").ShouldNot(Receive())
		Expect(strings.Count(log.String(), "share session refused")).To(Equal(1), "a process is logged once")
	})

	It("ends when an acknowledgement contradicts the ledger, and the next one is in line again", func() {
		a := newAdaptor(config())
		n := a.join("b1", "i")
		done := a.set(ctx, contract("t", 100_000, 10, members("b1", 100_000, 10)))
		g := n.granted()
		wrong := &srtmv1.Grant{Topic: "t", Epoch: g.Epoch, Share: &srtmv1.Share{RateMilli: 1, Burst: 1}}
		n.ack(wrong, 0)
		Eventually(n.ended).Should(Receive(fails(codes.Unavailable, loop.ReasonBadSequence)))
		n = a.join("b1", "i", heldShare("t", g.Epoch, 100_000, 10)) // the node had applied the grant
		n.accept()
		Eventually(done).Should(Receive(BeNil()))
		Expect(a.acknowledged("t")).To(Equal(map[string][2]int64{"b1": {100_000, 10}}))
	})

	It("ends when a report is nonsense", func() {
		a := newAdaptor(config())
		n := a.join("b1", "i")
		n.send(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Report{Report: &srtmv1.NodeReport{Topics: []*srtmv1.TopicLoad{
			{Topic: "t"}, {Topic: "u", Step: durationpb.New(time.Second), Offered: 1 << 63},
		}}}})
		var err error
		Eventually(n.ended).Should(Receive(&err))
		Expect(violations(err)).To(Equal([]string{"report.topics[0].step", "report.topics[1]"}))
	})

	It("ends when the adaptor stops", func() {
		a := newAdaptor(config())
		n := a.join("b1", "i")
		a.stop()
		Eventually(n.ended).Should(Receive(fails(codes.Unavailable, loop.ReasonClosing)))
	})
})

var _ = Describe("A broker that comes back", func() {
	It("as a new process gets its share again, without tokens", func() {
		a := newAdaptor(config())
		b1, b2 := a.join("b1", "one"), a.join("b2", "one")
		b1.accept()
		b2.accept()
		Expect(<-a.set(ctx, contract("t", 100_000, 10, members("b1", 60_000, 6, "b2", 40_000, 4)))).To(Succeed())
		b1.leave()
		Eventually(func() []string { return a.server.State().Connected }).Should(Equal([]string{"b2"}))
		Expect(a.acknowledged("t")).To(HaveKeyWithValue("b1", [2]int64{60_000, 6}), "it may be using it")
		b1 = a.join("b1", "two")
		g := b1.granted()
		Expect(g.Share.RateMilli).To(BeEquivalentTo(60_000))
		Expect(g.TokensMilli).To(BeZero())
	})
})

var _ = Describe("Adopting a contract", func() {
	adopt := func(req *srtmv1.SetContractRequest) *srtmv1.SetContractRequest { req.Adopt = true; return req }
	tuned := func(req *srtmv1.SetContractRequest) *srtmv1.SetContractRequest {
		req.ShareRule = share.Sqrt
		return req
	}

	It("waits for every member's hello, and then leaves tuned shares as they are", func() {
		a := newAdaptor(config())
		b1 := a.join("b1", "i", heldShare("t", 70, 80_000, 9))
		Expect(<-a.set(ctx, adopt(tuned(contract("t", 100_000, 10, members("b1", 50_000, 5, "b2", 50_000, 5)))))).To(Succeed())
		Expect(a.server.State().Adopting).To(Equal([]string{"t"}))
		Expect(names(a)).To(Equal([]string{"t"}))
		Consistently(b1.grants, "20ms").ShouldNot(Receive())
		b2 := a.join("b2", "i", heldShare("t", 71, 20_000, 1))
		Eventually(func() []string { return a.server.State().Adopting }).Should(BeEmpty())
		Consistently(b1.grants, "20ms").ShouldNot(Receive())
		Expect(b2.grants).NotTo(Receive())
		Expect(a.acknowledged("t")).To(Equal(map[string][2]int64{"b1": {80_000, 9}, "b2": {20_000, 1}}))
		Expect(<-a.set(ctx, adopt(tuned(contract("t", 100_000, 10, members("b1", 50_000, 5, "b2", 50_000, 5)))))).To(Succeed())
		Consistently(b1.grants, "10ms").ShouldNot(Receive(), "a contract it knows is left as it is")
		Expect(<-a.set(ctx, adopt(tuned(contract("t", 200_000, 10, members("b1", 200_000, 10)))))).To(fails(codes.FailedPrecondition, loop.ReasonConflict))
	})

	It("gives what was on its way, or ended with a lease, to all by what they hold, and takes from none", func() {
		a := newAdaptor(config())
		b1 := a.join("b1", "i", heldShare("t", 70, 60_000, 6)) // of 80 and 20
		b2 := a.join("b2", "i", heldShare("t", 71, 15_000, 2))
		Expect(<-a.set(ctx, adopt(tuned(contract("t", 100_000, 10, members("b1", 50_000, 5, "b2", 50_000, 5)))))).To(Succeed())
		Expect(b1.granted().Share).To(HaveField("RateMilli", BeEquivalentTo(80_000)))
		Expect(b2.granted().Share).To(HaveField("RateMilli", BeEquivalentTo(20_000)))
	})

	It("gives a member that lost its share the first one again, out of acknowledged decreases", func() {
		a := newAdaptor(config())
		Expect(<-a.set(ctx, adopt(contract("t", 100_000, 10, members("b1", 50_000, 5, "b2", 50_000, 5))))).To(Succeed())
		b1 := a.join("b1", "i", heldShare("t", 70, 80_000, 9))
		b2 := a.join("b2", "anew")
		granted := b1.granted()
		Expect(granted.Epoch).To(BeNumerically(">", 70))
		Expect(granted.Share.RateMilli).To(BeEquivalentTo(50_000))
		// Meanwhile b2 may have the part that no broker holds.
		select {
		case g := <-b2.grants:
			Expect(80_000 + g.Share.RateMilli).To(BeNumerically("<=", 100_000))
			b2.ack(g, 0)
		default:
		}
		b1.ack(granted, 4000)
		b2.accept()
		Eventually(func() map[string][2]int64 { return a.acknowledged("t") }).Should(
			Equal(map[string][2]int64{"b1": {50_000, 5}, "b2": {50_000, 5}}))
	})

	It("frees the share of a member that an operator declares dead", func() {
		a := newAdaptor(config())
		b1 := a.join("b1", "i", heldShare("t", 70, 50_000, 5))
		Expect(<-a.set(ctx, adopt(contract("t", 100_000, 10, members("b1", 50_000, 5, "b2", 50_000, 5))))).To(Succeed())
		Expect(a.server.State().Adopting).To(Equal([]string{"t"}))
		_, err := a.client.ForgetBroker(ctx, &srtmv1.ForgetBrokerRequest{BrokerId: "b3"})
		Expect(err).To(fails(codes.NotFound, loop.ReasonUnknown))
		_, err = a.client.ForgetBroker(ctx, &srtmv1.ForgetBrokerRequest{BrokerId: "b1"})
		Expect(err).To(fails(codes.FailedPrecondition, loop.ReasonConnected))
		r, err := a.client.ForgetBroker(ctx, &srtmv1.ForgetBrokerRequest{BrokerId: "b2"})
		Expect(err).NotTo(HaveOccurred())
		Expect(r.Freed).To(HaveLen(1))
		Expect(r.Freed[0].Share).To(BeNil(), "it was waited for")
		r, err = a.client.ForgetBroker(ctx, &srtmv1.ForgetBrokerRequest{BrokerId: "b2"})
		Expect(err).NotTo(HaveOccurred(), "said twice")
		Expect(r.Freed).To(BeEmpty())
		Expect(a.server.State().Adopting).To(BeEmpty())
		Consistently(b1.grants, "20ms").ShouldNot(Receive(), "its part is kept for it, or moved by the loaddistributor")
		req := contract("t", 100_000, 10, members("b1", 100_000, 10))
		req.Update = true
		Expect(<-a.set(ctx, req)).To(Succeed())
		Expect(b1.granted().Share).To(HaveField("RateMilli", BeEquivalentTo(100_000)))
	})

	// There is one token. The broker without a part now may have the token.
	for name, change := range map[string]func(*srtmv1.SetContractRequest){
		"adopted": func(req *srtmv1.SetContractRequest) { req.Adopt = true },
		"updated": func(req *srtmv1.SetContractRequest) { req.Update = true },
	} {
		It("waits for brokers, too, that are to have nothing of it, when it is "+name, func() {
			a := newAdaptor(config())
			b1 := a.join("b1", "i")
			req := contract("t", 100_000, 1, members("b1", 100_000, 1))
			req.Awaited = []string{"b1", "b 2"}
			change(req)
			Expect(<-a.set(ctx, req)).To(fails(codes.InvalidArgument, loop.ReasonBadRequest))
			req.Awaited = []string{"b2"}
			Expect(<-a.set(ctx, req)).To(Succeed())
			Expect(a.server.State().Adopting).To(Equal([]string{"t"}))
			Consistently(b1.grants, "20ms").ShouldNot(Receive())
			b2 := a.join("b2", "i", heldShare("t", 70, 100_000, 1))
			granted := b2.granted()
			Expect(granted.Share.GetRateMilli()).To(BeZero())
			Consistently(b1.grants, "20ms").ShouldNot(Receive(), "before it is given up")
			b2.ack(granted, 0)
			Expect(b1.granted().Share).To(HaveField("RateMilli", BeEquivalentTo(100_000)))
		})
	}

	It("is undone by a removal, which waits for the same brokers", func() {
		a := newAdaptor(config())
		req := func() *srtmv1.SetContractRequest {
			return adopt(contract("t", 100_000, 10, members("b1", 100_000, 10)))
		}
		Expect(<-a.set(ctx, req())).To(Succeed())
		_, err := a.client.RemoveContract(ctx, &srtmv1.RemoveContractRequest{Topic: "t"})
		Expect(err).NotTo(HaveOccurred())
		Expect(names(a)).To(BeEmpty())
		Expect(<-a.set(ctx, req())).To(fails(codes.Unavailable, loop.ReasonBusy))
		b1 := a.join("b1", "i", heldShare("t", 70, 100_000, 10))
		granted := b1.granted()
		Expect(granted.Share.GetRateMilli()).To(BeZero())
		b1.ack(granted, 0)
		Eventually(func() error { return <-a.set(ctx, req()) }).Should(Succeed())
	})

	It("is not a new contract when it is set or updated meanwhile: no token comes with it", func() {
		a := newAdaptor(config())
		Expect(<-a.set(ctx, adopt(contract("t", 100_000, 10, members("b1", 50_000, 5, "b2", 50_000, 5))))).To(Succeed())
		update := contract("t", 120_000, 12, members("b1", 60_000, 6, "b2", 60_000, 6))
		update.Update = true
		Expect(<-a.set(ctx, update)).To(Succeed())
		b1 := a.join("b1", "i", heldShare("t", 70, 40_000, 4))
		Consistently(b1.grants, "20ms").ShouldNot(Receive())
		set := a.set(ctx, contract("t", 120_000, 12, members("b1", 60_000, 6, "b2", 60_000, 6)))
		b2 := a.join("b2", "i", heldShare("t", 71, 40_000, 4))
		for _, b := range []*node{b1, b2} {
			g := b.granted()
			Expect(g.Share.GetRateMilli()).To(BeEquivalentTo(60_000))
			Expect(g.TokensMilli).To(BeZero())
			b.ack(g, 0)
		}
		Expect(<-set).To(Succeed())
	})
})

var _ = Describe("A rule", func() {
	report := func(n *node, topic string, offered, maxBacklog uint64) {
		n.send(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Report{Report: &srtmv1.NodeReport{Topics: []*srtmv1.TopicLoad{
			{Topic: topic, Step: durationpb.New(time.Millisecond), Offered: offered, MaxBacklog: maxBacklog},
		}}}})
	}
	proportional := func(req *srtmv1.SetContractRequest) *srtmv1.SetContractRequest {
		req.ShareRule = "proportional"
		return req
	}

	It("moves shares to where the load is, and never grants more than the contract", func() {
		a := newAdaptor(config())
		b1, b2 := a.join("b1", "i"), a.join("b2", "i")
		b1.accept()
		b2.accept()
		Expect(<-a.set(ctx, proportional(contract("t", 100_000, 10, members("b1", 50_000, 5, "b2", 50_000, 5))))).To(Succeed())
		Eventually(func() map[string][2]int64 {
			report(b1, "t", 80, 8)
			report(b2, "t", 20, 2)
			return a.acknowledged("t")
		}).Should(Equal(map[string][2]int64{"b1": {80_000, 8}, "b2": {20_000, 2}}))
		// Noise within the dead band changes no share.
		before := a.server.State().Topics[0].Members[0].GrantedEpoch
		for range 5 {
			report(b1, "t", 81, 8)
			report(b2, "t", 20, 2)
		}
		Consistently(func() uint64 { return a.server.State().Topics[0].Members[0].GrantedEpoch }, "50ms").Should(Equal(before))
	})

	It("leaves a broker that publishers have moved to what they need, and the one before what it has left", func() {
		cfg := config()
		cfg.Period, cfg.Window = 5*time.Second, time.Hour // later than the spec's steps after the move
		a := newAdaptor(cfg)
		b1, b2 := a.join("b1", "i"), a.join("b2", "i")
		b1.accept()
		b2.accept()
		first := contract("t", 5_000_000, 100, members("b1", 5_000_000, 100))
		first.ShareRule = share.Sqrt
		Expect(<-a.set(ctx, first)).To(Succeed())
		for range 5 {
			report(b1, "t", 4, 0) // 4,000 msg/s
		}
		moved := contract("t", 5_000_000, 100, members("b1", 125_000, 1, "b2", 4_875_000, 99))
		moved.ShareRule, moved.Update = share.Sqrt, true
		moved.Members[0].Publishers, moved.Members[0].Retiring = 0, true
		Expect(<-a.set(ctx, moved)).To(Succeed())
		enough := HaveKeyWithValue("b2", ContainElement(BeNumerically(">=", 4_200_000)))
		Eventually(func() map[string][2]int64 { return a.acknowledged("t") }).Should(enough)
		report(b1, "t", 4, 0) // before the publishers have followed
		Consistently(func() map[string][2]int64 { return a.acknowledged("t") }, "50ms").Should(enough)
		Eventually(func() map[string][2]int64 { // until a report from after the handover has come
			report(b2, "t", 4, 0)
			report(b1, "t", 0, 0)
			return a.acknowledged("t")
		}).Should(HaveKeyWithValue("b1", Not(ContainElement(BeNumerically(">", 125_000)))), "nothing but the floor")
		Expect(a.acknowledged("t")).To(enough)
	})
})

var _ = Describe("A configuration", func() {
	It("is refused with all its faults", func() {
		_, err := loop.New(loop.Config{Period: 2 * time.Second, Window: time.Second, AckTimeout: -1})
		Expect(err).To(HaveOccurred())
		for _, part := range []string{"window 1s: want 1ms to 1h, and at least the 2s of period", "acknowledgement timeout", "no logger"} {
			Expect(err.Error()).To(ContainSubstring(part))
		}
	})

	It("registers its metrics", func() {
		cfg := config()
		reg := prometheus.NewRegistry()
		cfg.Metrics = reg
		a := newAdaptor(cfg)
		a.join("b1", "i")
		b2 := a.join("b2", "i", heldShare("t", 70, 40_000, 3))
		req := contract("t", 100_000, 10, members("b1", 60_000, 7, "b2", 40_000, 3))
		req.Adopt = true
		Expect(<-a.set(ctx, req)).To(Succeed())
		b2.leave()
		Eventually(func() []string { return a.server.State().Connected }).Should(Equal([]string{"b1"}))
		families, err := reg.Gather()
		Expect(err).NotTo(HaveOccurred())
		values, parts := map[string]string{}, map[string]float64{}
		for _, f := range families {
			for _, m := range f.Metric {
				if f.GetName() == "srtm_tbadaptor_contract_rate" {
					parts[m.Label[0].GetValue()] = m.GetGauge().GetValue()
				}
			}
			values[f.GetName()] = fmt.Sprint(f.Metric[0].GetGauge().GetValue(), f.Metric[0].GetCounter().GetValue())
		}
		Expect(values).To(HaveKeyWithValue("srtm_tbadaptor_sessions", "1 0"))
		Expect(values).To(HaveKey("srtm_tbadaptor_grants_total"))
		Expect(parts).To(Equal(map[string]float64{"live": 0, "away": 40, "free": 60}))
		_, err = loop.New(cfg)
		Expect(err).To(HaveOccurred())
	})

	It("has series of 500 topics, the first by name, and counts the topics without series", func() {
		cfg := config()
		reg := prometheus.NewRegistry()
		cfg.Metrics = reg
		a := newAdaptor(cfg)
		a.join("b1", "i")
		for i := range 503 {
			req := contract(fmt.Sprintf("t%03d", i), 1000, 10, members("b1", 1000, 10))
			req.Adopt = true
			Expect(<-a.set(ctx, req)).To(Succeed())
		}
		families, err := reg.Gather()
		Expect(err).NotTo(HaveOccurred())
		series := map[string]int{}
		for _, f := range families {
			series[f.GetName()] = len(f.Metric)
			if f.GetName() == "srtm_tbadaptor_topics_without_series" {
				Expect(f.Metric[0].GetGauge().GetValue()).To(BeEquivalentTo(3))
			}
		}
		Expect(series).To(And(HaveKeyWithValue("srtm_tbadaptor_pool_tokens", 500), HaveKeyWithValue("srtm_tbadaptor_share_rate", 500), HaveKey("srtm_tbadaptor_topics_without_series")))
	})

	It("numbers its answers, and answers no more than that nothing has changed", func() {
		a := newAdaptor(config())
		broker := a.join("b1", "i")
		set := func(topic string) {
			GinkgoHelper()
			done := a.set(ctx, contract(topic, 1000, 10, members("b1", 1000, 10)))
			broker.ack(broker.granted(), 0)
			Eventually(done).Should(Receive(BeNil()))
		}
		list := func(unless uint64) *srtmv1.ListSharesResponse {
			GinkgoHelper()
			r, err := a.client.ListShares(ctx, &srtmv1.ListSharesRequest{UnlessRevision: unless})
			Expect(err).NotTo(HaveOccurred())
			return r
		}
		set("t")
		first := list(0)
		Expect(first.Topics).To(HaveLen(1))
		Expect(first.Revision).NotTo(BeZero())
		broker.send(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Renew{Renew: &srtmv1.LeaseRequest{Stamp: 1}}})
		Expect(broker.granted()).To(BeNil(), "its lease is renewed")
		second := list(first.Revision)
		Expect(second.Topics).To(BeEmpty())
		Expect(second.Revision).To(Equal(first.Revision))
		set("u")
		Expect(list(first.Revision).Topics).To(HaveLen(2))
	})
})

func names(a *adaptor) []string {
	GinkgoHelper()
	r, err := a.client.ListShares(ctx, &srtmv1.ListSharesRequest{})
	Expect(err).NotTo(HaveOccurred())
	var list []string
	for _, t := range r.Topics {
		if !t.Removing {
			list = append(list, t.Topic)
		}
	}
	return list
}

func violations(err error) []string {
	var fields []string
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			for _, v := range bad.FieldViolations {
				fields = append(fields, v.Field)
			}
		}
	}
	return fields
}

// term is a term that the spec ends.
type term struct {
	number uint64
	until  atomic.Int64
}

func newTerm(number uint64) *term {
	t := &term{number: number}
	t.until.Store(int64(mono.Never))
	return t
}

func (t *term) Number() uint64   { return t.number }
func (t *term) Until() mono.Time { return mono.Time(t.until.Load()) }

var _ = Describe("Two adaptors at once", func() {
	// The first adaptor hangs and its leadership is over, without its knowledge.
	var first, second *adaptor
	var lostTerm *term
	var b1, b2 *node
	hello := func(id string, termNumber uint64) *srtmv1.NodeMessage {
		return &srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Hello{Hello: &srtmv1.NodeHello{
			BrokerId: id, Instance: "i", Policy: srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE, Term: termNumber,
		}}}
	}
	BeforeEach(func() {
		cfg := config()
		lostTerm = newTerm(5)
		cfg.Term = lostTerm
		first = newAdaptor(cfg)
		cfg.Term = newTerm(6)
		second = newAdaptor(cfg)
		req := contract("t", 100_000, 10, members("b1", 50_000, 5, "b2", 50_000, 5))
		b1, b2 = first.join("b1", "i"), first.join("b2", "i")
		b1.accept()
		b2.accept()
		Expect(<-first.set(ctx, req)).To(Succeed())
		Expect(b2.term.Load()).To(BeEquivalentTo(5))
		b1.leave()
		req.Adopt = true
		Expect(<-second.set(ctx, req)).To(Succeed())
		b1 = second.join("b1", "i", heldShare("t", 70, 50_000, 5))
	})

	It("do not grant a share twice: the first ends its sessions with its term, and refuses everything", func() {
		lostTerm.until.Store(int64(clock.Mono()))
		_, err := first.client.ForgetBroker(ctx, &srtmv1.ForgetBrokerRequest{BrokerId: "b1"})
		Expect(err).To(fails(codes.Unavailable, loop.ReasonNotLeading), "b2 would be granted what b1 has of the second")
		Eventually(b2.ended).Should(Receive(fails(codes.Unavailable, loop.ReasonNotLeading)))
		Expect(<-first.set(ctx, contract("u", 100_000, 10, members("b1", 100_000, 10)))).To(fails(codes.Unavailable, loop.ReasonNotLeading))
		_, err = first.client.RemoveContract(ctx, &srtmv1.RemoveContractRequest{Topic: "t"})
		Expect(err).To(fails(codes.Unavailable, loop.ReasonNotLeading))
		_, err = first.client.ListShares(ctx, &srtmv1.ListSharesRequest{})
		Expect(err).To(fails(codes.Unavailable, loop.ReasonNotLeading))
		second := first.open()
		second.send(hello("b2", 5))
		Eventually(second.ended).Should(Receive(fails(codes.Unavailable, loop.ReasonNotLeading)))
		Expect(first.server.State().Connected).To(BeEmpty())
		Consistently(b1.grants, "20ms").ShouldNot(Receive(), "b2 has not reported to the second")
	})

	It("end by themselves, unasked", func() {
		lostTerm.until.Store(int64(clock.Mono()))
		Eventually(b2.ended).Should(Receive(fails(codes.Unavailable, loop.ReasonNotLeading)))
	})

	It("are distinguished by their terms: a broker that has followed the second is none of the first's", func() {
		reconnected := first.open()
		reconnected.send(hello("b1", 6))
		Eventually(reconnected.ended).Should(Receive(fails(codes.FailedPrecondition, loop.ReasonOldTerm)))
	})
})

var _ = Describe("An adaptor whose term is lent", func() {
	var a *adaptor
	lead := func(r *srtmv1.LeadRequest) *srtmv1.LeadResponse {
		GinkgoHelper()
		answer, err := a.client.Lead(ctx, r)
		Expect(err).NotTo(HaveOccurred())
		return answer
	}
	lend := func(heard *srtmv1.LeadResponse, lease time.Duration, term uint64) *srtmv1.LeadRequest {
		return &srtmv1.LeadRequest{Instance: heard.Instance, Stamp: heard.Stamp, Lease: durationpb.New(lease), Term: term}
	}
	set := func() error { return <-a.set(ctx, contract("t", 100_000, 10, members("b1", 100_000, 10))) }
	BeforeEach(func() {
		cfg := config()
		cfg.ByMandate = true
		a = newAdaptor(cfg)
	})

	It("does nothing without, and nothing after, and begins again with an empty memory", func() {
		response := lead(&srtmv1.LeadRequest{})
		Expect(response.Leads).To(BeFalse())
		Expect(set()).To(fails(codes.Unavailable, loop.ReasonNotLeading))
		refused := a.open()
		refused.send(&srtmv1.NodeMessage{Message: &srtmv1.NodeMessage_Hello{Hello: &srtmv1.NodeHello{BrokerId: "b1", Instance: "i", Term: 9}}})
		Eventually(refused.ended).Should(Receive(fails(codes.Unavailable, loop.ReasonNotLeading)), "its term is not known yet")

		Expect(lead(&srtmv1.LeadRequest{Instance: "another", Stamp: response.Stamp, Lease: durationpb.New(time.Hour), Term: 7}).Leads).To(BeFalse())
		now := lead(lend(response, time.Hour, 7))
		Expect(now.Leads).To(BeTrue())
		Expect(now.Term).To(BeEquivalentTo(7))
		b1 := a.join("b1", "i")
		b1.accept()
		Expect(set()).To(Succeed())
		Expect(b1.term.Load()).To(BeEquivalentTo(7))
		// The adaptor continues in its term, at least until the end of the earlier loan.
		Expect(lead(lend(now, time.Millisecond, 8)).Term).To(BeEquivalentTo(7))
		Expect(a.server.State().Topics).To(HaveLen(1))
	})

	It("waits for the holders of a removed contract through the beginning of another term", func() {
		const lease = 100 * time.Millisecond
		var first *srtmv1.LeadResponse
		Eventually(func() bool { // the term may be over before its grant is received
			first = lead(&srtmv1.LeadRequest{})
			return lead(lend(first, lease, 7)).Leads
		}).Should(BeTrue())
		end := mono.Time(first.Stamp).Add(lease)
		req := contract("t", 100_000, 10, members("b1", 100_000, 10))
		req.Holders = []string{"b2"}
		done := make(chan error, 1)
		go func() {
			err := <-a.set(ctx, req)
			for tries := 0; status.Code(err) == codes.Unavailable && tries < 10_000; tries++ { // no term, as the controller repeats it
				<-time.After(time.Millisecond)
				err = <-a.set(ctx, req)
			}
			done <- err
		}()
		Eventually(func() bool { return clock.Mono() >= end }, "10s", "10us").Should(BeTrue())
		next, err := a.server.Lead(ctx, lend(first, time.Hour, 8)) // mostly the first to notice the end
		Expect(err).NotTo(HaveOccurred())
		Expect(next.Term).To(BeEquivalentTo(8))
		b1 := a.join("b1", "i")
		Consistently(b1.grants, "20ms").ShouldNot(Receive(), "b2 may still be using its share")
		b2 := a.join("b2", "i", heldShare("t", 70, 60_000, 6))
		b2.ack(b2.granted(), 0)
		b1.ack(b1.granted(), 0)
		Expect(<-done).To(Succeed())
	})

	It("ends its sessions when it is over, and takes no term twice", func() {
		now := lead(lend(lead(&srtmv1.LeadRequest{}), time.Minute, 7))
		Expect(now.Leads).To(BeTrue())
		short := newAdaptor(func() loop.Config { c := config(); c.ByMandate = true; return c }())
		a = short
		var response *srtmv1.LeadResponse
		Eventually(func() bool { // the term may be over before its grant is received
			response = lead(&srtmv1.LeadRequest{})
			return lead(lend(response, time.Second, 7)).Leads
		}).Should(BeTrue())
		Eventually(func() bool { now = lead(&srtmv1.LeadRequest{}); return now.Leads }).Should(BeFalse())
		Expect(set()).To(fails(codes.Unavailable, loop.ReasonNotLeading))
		_, err := a.client.Lead(ctx, lend(now, time.Hour, 7))
		Expect(err).To(fails(codes.FailedPrecondition, loop.ReasonOldTerm))
		_, err = a.client.Lead(ctx, &srtmv1.LeadRequest{Instance: now.Instance, Stamp: now.Stamp + uint64(time.Hour), Lease: durationpb.New(time.Hour), Term: 9})
		Expect(err).To(fails(codes.InvalidArgument, loop.ReasonBadRequest))
		Expect(lead(lend(response, time.Nanosecond, 8)).Leads).To(BeFalse(), "it is over already")
		Expect(lead(lend(now, time.Hour, 8)).Leads).To(BeTrue())
		Expect(a.server.State().Topics).To(BeEmpty())
	})

	It("reports in its health that no loaddistributor lends it a term", func() {
		Expect(a.server.Health()).To(MatchError(MatchRegexp(`^no loaddistributor has asked this adaptor to act since .+ UTC: .*--tbadaptor-address`)))
		response := lead(&srtmv1.LeadRequest{})
		Expect(a.server.Health()).To(MatchError(HavePrefix("this adaptor does not act, and a loaddistributor asked last ")))
		Expect(errors.As(a.server.Health(), new(obs.Notice))).To(BeTrue(), "a restart would not help")
		Expect(lead(lend(response, time.Hour, 7)).Leads).To(BeTrue())
		Expect(a.server.Health()).To(Succeed())
	})

	It("has none when it leads with its loaddistributor", func() {
		a = newAdaptor(config())
		_, err := a.client.Lead(ctx, &srtmv1.LeadRequest{})
		Expect(err).To(fails(codes.FailedPrecondition, loop.ReasonOldTerm))
	})
})
