package agent_test

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
	"github.com/srtm-io/srtm/tokenbucket"
)

func lease(stamp uint64, flex, session time.Duration) *srtmv1.GrantMessage {
	return &srtmv1.GrantMessage{Message: &srtmv1.GrantMessage_Lease{Lease: &srtmv1.Lease{
		Stamp: stamp, Flex: durationpb.New(flex), Session: durationpb.New(session),
	}}}
}

// flexible is a grant of 50 msg/s and a burst of 4 messages, with a base of 40 msg/s and 3 messages.
func flexible(topic string, epoch uint64) *srtmv1.GrantMessage {
	g := grant(topic, epoch, 50_000, 4, 4000)
	g.GetGrant().Flex = &srtmv1.Share{RateMilli: 10_000, Burst: 1}
	return g
}

var (
	whole = tokenbucket.Share{Rate: 50_000, Burst: 4}
	base  = tokenbucket.Share{Rate: 40_000, Burst: 3}
)

// disk is a store that can be made to fail.
type disk struct {
	agent.Store
	mu   sync.Mutex
	save error
	drop error
}

func (d *disk) fail(save, drop error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.save, d.drop = save, drop
}

func (d *disk) Save(b agent.Base) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.save != nil {
		return d.save
	}
	return d.Store.Save(b)
}

func (d *disk) Remove(topic string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.drop != nil {
		return d.drop
	}
	return d.Store.Remove(topic)
}

var _ = Describe("The lease", func() {
	var p *plane
	var node *agenttest.Node
	var files *agent.Files
	var store *disk
	BeforeEach(func() {
		p, node = newPlane(), agenttest.New()
		var err error
		files, err = agent.OpenFiles(filepath.Join(GinkgoT().TempDir(), "shares"))
		Expect(err).NotTo(HaveOccurred())
		store = &disk{Store: files}
	})
	start := func(policy agent.Policy, instance string) (stop func()) {
		GinkgoHelper()
		cfg := config(p.address)
		cfg.Policy, cfg.Store, cfg.Instance = policy, store, instance
		subject, err := agent.New(cfg, node)
		Expect(err).NotTo(HaveOccurred())
		return run(subject)
	}
	join := func() (*controlSession, *grantSession, *srtmv1.NodeHello) {
		GinkgoHelper()
		control := accept(p.control)
		next(control, (*srtmv1.BrokerMessage).GetHello)
		control.send(welcome("", 10*time.Millisecond))
		grants := accept(p.grants)
		return control, grants, next(grants, (*srtmv1.NodeMessage).GetHello)
	}
	share := func() tokenbucket.Share {
		t, _ := node.Topic("t")
		return t.Share
	}

	// lapsed reads until the broker has requested a renewal and has acknowledged that only the base is left, in any
	// order. It returns the stamp of the request.
	lapsed := func(grants *grantSession) (stamp uint64) {
		GinkgoHelper()
		atBase := false
		Eventually(func() bool {
			select {
			case m := <-grants.in:
				if r := m.GetRenew(); r != nil && stamp == 0 {
					stamp = r.Stamp
				}
				if a := m.GetAck(); a != nil {
					atBase = a.GetShare().GetRateMilli() == 40_000
				}
			default:
			}
			return atBase && stamp != 0
		}).Should(BeTrue(), "a renewal and the base")
		return stamp
	}

	It("is requested in time, and counts from the request", func() {
		start(agent.Available, "i1")
		control, grants, hello := join()
		Expect(hello.Policy).To(Equal(srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE))
		control.send(prepare(1, "t"))
		result(control)
		grants.send(lease(hello.Stamp, 2*time.Second, time.Minute))
		grants.send(flexible("t", 7))
		Expect(ack(grants)).To(Equal([]any{"t", uint64(7), int64(50_000), int64(4), int64(0)}))
		Expect(share()).To(Equal(whole))
		for range 2 {
			renew := next(grants, (*srtmv1.NodeMessage).GetRenew)
			Expect(renew.Stamp).To(BeNumerically(">", hello.Stamp))
			grants.send(lease(renew.Stamp, 2*time.Second, time.Minute))
			Eventually(func() uint64 { t, _ := node.Topic("t"); return uint64(t.FlexUntil) }).Should(Equal(renew.Stamp + 2e9))
		}
	})

	It("leaves the base when it ends, reports that, and does not come back", func() {
		start(agent.Available, "i1")
		control, grants, hello := join()
		control.send(prepare(1, "t"))
		result(control)
		grants.send(lease(hello.Stamp, 300*time.Millisecond, time.Minute))
		grants.send(flexible("t", 7))
		asked := lapsed(grants)
		Expect(share()).To(Equal(base))
		grants.send(lease(asked, time.Hour, time.Hour))
		grants.send(grant("t", 6, 1, 1, 0)) // stale: the agent answers with the share in force
		Expect(ack(grants)).To(Equal([]any{"t", uint64(7), int64(40_000), int64(3), int64(0)}))
		Expect(share()).To(Equal(base))
		grants.send(flexible("t", 8))
		// The base kept three of the four tokens, and four more come.
		Expect(ack(grants)).To(Equal([]any{"t", uint64(8), int64(50_000), int64(4), int64(3000)}))
		Expect(share()).To(Equal(whole))
	})

	It("is worth its base if it is over when the grant comes", func() {
		start(agent.Available, "i1")
		control, grants, hello := join()
		control.send(prepare(1, "t"))
		result(control)
		grants.send(lease(hello.Stamp, time.Nanosecond, time.Minute))
		grants.send(flexible("t", 7))
		Expect(ack(grants)[2:4]).To(Equal([]any{int64(40_000), int64(3)}))
		Expect(share()).To(Equal(base))
	})

	It("ends the session of an adaptor whose term is over, and heeds nothing of it", func() {
		start(agent.Available, "i1")
		control, grants, hello := join()
		Expect(hello.Term).To(BeZero())
		control.send(prepare(1, "t"))
		result(control)
		later := lease(hello.Stamp, time.Minute, time.Hour)
		later.GetLease().Term = 6
		grants.send(later)
		grants.send(flexible("t", 7)) // a grant of a version without terms
		ack(grants)
		old := grant("t", 8, 90_000, 9, 0)
		old.GetGrant().Term = 5
		grants.send(old)
		grants = accept(p.grants)
		Expect(next(grants, (*srtmv1.NodeMessage).GetHello).Term).To(BeEquivalentTo(6))
		Expect(share()).To(Equal(whole))
	})

	It("leaves nothing to a strict broker", func() {
		start(agent.Strict, "i1")
		control, grants, hello := join()
		Expect(hello.Policy).To(Equal(srtmv1.LeasePolicy_LEASE_POLICY_STRICT))
		control.send(prepare(1, "t"))
		result(control)
		grants.send(lease(hello.Stamp, 100*time.Millisecond, 1500*time.Millisecond))
		grants.send(flexible("t", 7))
		// The share falls to the base and then to nothing. A slow broker may skip steps.
		for last := int64(50_000); last > 0; {
			rate := ack(grants)[2].(int64)
			Expect(rate).To(Or(BeEquivalentTo(50_000), BeEquivalentTo(40_000), BeZero()))
			Expect(rate).To(BeNumerically("<=", last))
			last = rate
		}
		Expect(share().IsZero()).To(BeTrue())
		Expect(files.Load()).To(BeEmpty(), "the broker must not use it after a restart")
	})

	It("keeps the base over a restart, without a word from the control plane", func() {
		stop := start(agent.Available, "i1")
		control, grants, hello := join()
		control.send(prepare(1, "t"))
		result(control)
		grants.send(lease(hello.Stamp, time.Minute, time.Hour))
		grants.send(flexible("t", 7))
		ack(grants)
		stop()

		next := agenttest.New()
		Expect(next.Prepare("t", nil, 0, time.Second, 0.5, 0, nil)).Error().NotTo(HaveOccurred())
		node = next
		p.stop()
		stop = start(agent.Available, "i2")
		Eventually(share).Should(Equal(base))
		stop()

		p = newPlane()
		start(agent.Available, "i3")
		_, _, hello = join()
		Expect(hello.Held).To(HaveLen(1))
		Expect(hello.Held[0].Epoch).To(BeEquivalentTo(7))
		Expect(hello.Held[0].Share).To(HaveField("RateMilli", int64(40_000)))
		Expect(hello.Held[0].Flex.GetRateMilli()).To(BeZero())
	})

	// renewal is a lease of an adaptor that frees shares by evidence.
	renewal := func(at uint64, flex time.Duration, sent uint64) *srtmv1.GrantMessage {
		m := lease(at, flex, time.Hour)
		m.GetLease().Sent = sent
		return m
	}

	It("takes nothing over a restart that the adaptor may have seen", func() {
		stop := start(agent.Available, "i1")
		control, grants, hello := join()
		control.send(prepare(1, "t"))
		result(control)
		grants.send(renewal(hello.Stamp, 2*time.Second, 17))
		grants.send(flexible("t", 7))
		ack(grants)
		Expect(next(grants, (*srtmv1.NodeMessage).GetRenew).Heard).To(BeEquivalentTo(17), "so that it counts on that")
		Expect(files.Alone()).To(BeFalse())
		Expect(files.Load()).To(HaveLen(1))
		stop()

		p.stop()
		p = newPlane()
		start(agent.Available, "i2")
		_, grants, hello = join()
		Expect(hello.Held).To(BeEmpty())
		Expect(files.Load()).To(BeEmpty())
		grants.send(renewal(hello.Stamp, 2*time.Second, 18))
		Expect(next(grants, (*srtmv1.NodeMessage).GetRenew).Heard).To(BeEquivalentTo(18))
	})

	It("keeps the base over a restart when the adaptor has been unavailable for twice a lease, until it is back", func() {
		stop := start(agent.Available, "i1")
		control, grants, hello := join()
		control.send(prepare(1, "t"))
		result(control)
		grants.send(renewal(hello.Stamp, 200*time.Millisecond, 17))
		grants.send(flexible("t", 7))
		ack(grants)
		Eventually(files.Alone).Should(BeTrue())
		p.stop()
		stop()

		node = agenttest.New()
		Expect(node.Prepare("t", nil, 0, time.Second, 0.5, 0, nil)).Error().NotTo(HaveOccurred())
		p = newPlane()
		stop = start(agent.Available, "i2")
		Eventually(share).Should(Equal(base))
		_, grants, hello = join()
		Expect(hello.Held).To(HaveLen(1))
		Expect(files.Alone()).To(BeTrue(), "no caller has relied on it")
		grants.send(renewal(hello.Stamp, time.Minute, 18))
		Eventually(files.Alone).Should(BeFalse())
		stop()
		start(agent.Available, "i3")
		Eventually(func() int { b, _ := files.Load(); return len(b) }).Should(BeZero())
	})

	It("forgets the base with the topic, and with the share", func() {
		start(agent.Available, "i1")
		control, grants, hello := join()
		grants.send(lease(hello.Stamp, time.Minute, time.Hour))
		for i, topic := range []string{"t", "u"} {
			control.send(prepare(uint64(i), topic))
			result(control)
			grants.send(flexible(topic, uint64(i+1)))
			ack(grants)
		}
		Expect(files.Load()).To(HaveLen(2))
		grants.send(grant("t", 9, 0, 0, 0))
		ack(grants)
		control.send(remove(5, "u"))
		Expect(result(control).Error).To(BeEmpty())
		Expect(files.Load()).To(BeEmpty())
	})

	It("does not acknowledge a smaller base that a crash would make larger again", func() {
		start(agent.Available, "i1")
		control, grants, hello := join()
		grants.send(lease(hello.Stamp, time.Minute, time.Hour))
		control.send(prepare(1, "t"))
		result(control)
		// At these rates no token comes during the test.
		grants.send(grant("t", 1, 40, 3, 0))
		ack(grants)
		broken := errors.New("the disk is broken")
		store.fail(broken, broken)
		grants.send(grant("t", 2, 20, 2, 0))
		Eventually(share).Should(Equal(tokenbucket.Share{Rate: 20, Burst: 2}))
		// A hello does not report the smaller share either.
		grants.end <- errors.New("the session ends")
		grants = accept(p.grants)
		again := next(grants, (*srtmv1.NodeMessage).GetHello)
		Expect(again.Held[0].Share).To(HaveField("RateMilli", int64(40)))
		Expect(files.Load()).To(ConsistOf(HaveField("Share.Rate", tokenbucket.Rate(40))))
		// The removal of the old file is enough.
		store.fail(broken, nil)
		Expect(ack(grants)).To(Equal([]any{"t", uint64(2), int64(20), int64(2), int64(0)}))
		Expect(files.Load()).To(BeEmpty())
	})

	It("reports what a crash would bring back, also of a topic that it lacks", func() {
		start(agent.Available, "i1")
		control, grants, hello := join()
		grants.send(lease(hello.Stamp, time.Minute, time.Hour))
		control.send(prepare(1, "t"))
		result(control)
		grants.send(grant("t", 7, 40, 3, 0))
		ack(grants)
		broken := errors.New("the disk is broken")
		store.fail(broken, broken)
		control.send(remove(2, "t"))
		Expect(result(control).Error).To(BeEmpty())
		grants.send(grant("t", 8, 0, 0, 0)) // not acknowledged
		grants.end <- errors.New("the session ends")
		grants = accept(p.grants)
		again := next(grants, (*srtmv1.NodeMessage).GetHello)
		Expect(again.Held).To(HaveLen(1))
		Expect(again.Held[0].Share).To(HaveField("RateMilli", int64(40)))
		Expect(again.Held[0].Epoch).To(BeEquivalentTo(7))
		store.fail(nil, nil)
		Expect(ack(grants)).To(Equal([]any{"t", uint64(0), int64(0), int64(0), int64(0)}))
	})
})

func TestFilesRefuseWhatTheyDidNotWrite(t *testing.T) {
	good := `{"version":1,"topic":"t","epoch":7,"rate_milli":5,"burst":2}`
	for _, c := range []struct{ name, content string }{
		{"t.json", ""}, {"t.json", "{"}, {"t.json", "null"}, {"u.json", good},
		{"t.json", `{"version":2,"topic":"t","epoch":7,"rate_milli":5,"burst":2}`},
		{"t.json", `{"version":1,"topic":"t","epoch":0,"rate_milli":5,"burst":2}`},
		{"t.json", `{"version":1,"topic":"t","epoch":7,"rate_milli":-5,"burst":2}`},
		{"t.json", `{"version":1,"topic":"t","epoch":7,"rate_milli":0,"burst":0}`},
	} {
		dir := t.TempDir()
		files, err := agent.OpenFiles(dir)
		testkit.Must(t, err)
		testkit.Must(t, os.WriteFile(filepath.Join(dir, c.name), []byte(c.content), 0o600))
		if _, err := files.Load(); err == nil {
			t.Errorf("%s with %q is taken", c.name, c.content)
		}
	}
}

func TestFilesKeepWhatWasSavedLast(t *testing.T) {
	dir := t.TempDir()
	files := testkit.Result(agent.OpenFiles(dir)).Must(t)
	first := agent.Base{Topic: "t", Epoch: 7, Share: tokenbucket.Share{Rate: 5, Burst: 2}}
	second := agent.Base{Topic: "t", Epoch: 8, Share: tokenbucket.Share{Rate: 9, Burst: 1}}
	for _, b := range []agent.Base{first, second} {
		testkit.Must(t, files.Save(b))
	}
	// The unfinished file of a killed process does not count.
	testkit.Must(t, os.WriteFile(filepath.Join(dir, "u.json.new"), []byte("{"), 0o600))
	got, err := files.Load()
	if err != nil || len(got) != 1 || got[0] != second {
		t.Fatalf("loaded %+v, %v, want %+v", got, err, second)
	}
	for range 2 { // the second time there is no file
		testkit.Must(t, files.Remove("t"))
	}
	if got, err := files.Load(); err != nil || len(got) != 0 {
		t.Errorf("loaded %+v, %v after Remove", got, err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("%d files are left over, %v", len(left), err)
	}
}
