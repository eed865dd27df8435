package subscriber_test

import (
	"context"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/client/fake"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
	"github.com/srtm-io/srtm/tools/iotpub/subscriber"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestSubscriber(t *testing.T) {
	RegisterFailHandler(Fail)
	SetDefaultEventuallyTimeout(testkit.Hang)
	RunSpecs(t, "subscriber")
}

var _ = Describe("a subscriber", func() {
	var (
		a, b    *fake.Broker
		lookup  *fake.Lookup
		s       *subscriber.Subscriber
		ctx     context.Context
		cancel  context.CancelFunc
		running sync.WaitGroup
		ended   error
	)
	BeforeEach(func() {
		var err error
		a, err = fake.NewBroker("a", &fake.Log{})
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(a.Close)
		b, err = fake.NewBroker("b", &fake.Log{})
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(b.Close)
		lookup = fake.NewLookup()
		DeferCleanup(lookup.Close)
		s, err = subscriber.New(subscriber.Config{
			Topic: "t", Channel: "c", Lookupd: []string{lookup.Address()}, LookupInterval: 10 * time.Millisecond, Run: 7, Sources: 2,
		})
		Expect(err).NotTo(HaveOccurred())
		ctx, cancel = context.WithCancel(context.Background())
		running.Go(func() { ended = s.Run(ctx) })
		DeferCleanup(func() {
			cancel()
			running.Wait()
		})
	})
	body := func(run, source, seq uint32) []byte {
		return payload.Append(nil, payload.Payload{Run: run, Source: source, Seq: seq, Intended: clock.Mono()}, 50)
	}
	delivered := func() uint64 { return s.Stats().Delivered }

	It("finds brokers as they get the topic, and finishes every message", func() {
		Expect(s.Connections()).To(BeZero())
		lookup.Set("t", a)
		Eventually(s.Connections).Should(Equal(1))
		lookup.Set("t", a, b)
		Eventually(s.Connections).Should(Equal(2))
		const each = 6000 // more than may be in flight
		for i := range uint32(each) {
			a.Deliver("t", body(7, 0, i))
			b.Deliver("t", body(7, 1, i))
		}
		Eventually(delivered).Should(BeNumerically("==", 2*each))
		Expect(s.Stats().EndToEnd.Count()).To(BeNumerically("==", 2*each))
		accepted := verify.NewSet(2)
		for i := range uint32(each) {
			accepted.Add(0, i)
			accepted.Add(1, i)
		}
		accepted.Add(0, each)
		account, missing := s.Compare(accepted, 5)
		Expect(account).To(Equal(verify.Result{Accepted: 2*each + 1, Delivered: 2 * each, Lost: 1}))
		Expect(missing).To(Equal([]verify.Message{{Source: 0, Seq: each}}))
		cancel()
		running.Wait()
		Expect(ended).NotTo(HaveOccurred())
		Expect(s.Connections()).To(BeZero())
		Eventually(a.Clients).Should(BeEmpty())
	})

	It("distinguishes duplicates and what is not of its run", func() {
		lookup.Set("t", a)
		for range 3 {
			a.Deliver("t", body(7, 1, 5))
		}
		a.Deliver("t", body(8, 0, 0))
		a.Deliver("t", body(7, 2, 0))
		a.Deliver("t", []byte("something else"))
		Eventually(func() [3]uint64 { st := s.Stats(); return [3]uint64{st.Delivered, st.Duplicated, st.Foreign} }).Should(Equal([3]uint64{1, 2, 3}))
	})

	It("needs to know where to ask", func() {
		_, err := subscriber.New(subscriber.Config{Topic: "t", Channel: "c"})
		Expect(err).To(MatchError(ContainSubstring("without an address")))
	})

	It("says that a broker cannot be reached", func() {
		b.Close()
		direct, err := subscriber.New(subscriber.Config{Topic: "t", Channel: "c", Nsqd: []string{b.Address()}})
		Expect(err).NotTo(HaveOccurred())
		Expect(direct.Run(ctx)).To(MatchError(ContainSubstring("refused")))
	})

	It("refuses names that are none", func() {
		bad, err := subscriber.New(subscriber.Config{Topic: "no topic", Channel: "c", Nsqd: []string{a.Address()}})
		Expect(err).NotTo(HaveOccurred())
		Expect(bad.Run(ctx)).To(MatchError(ContainSubstring("invalid topic name")))
	})
})
