package agent_test

import (
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

var _ = Describe("A capture of arrivals", func() {
	var p *plane
	var node *agenttest.Node
	var subject *agent.Agent
	var stop func()
	var registry *prometheus.Registry
	BeforeEach(func() {
		p, node, registry = newPlane(), agenttest.New(), prometheus.NewRegistry()
		cfg := config(p.address)
		cfg.Metrics = registry
		var err error
		subject, err = agent.New(cfg, node)
		Expect(err).NotTo(HaveOccurred())
		stop = run(subject)
	})
	joined := func() *controlSession {
		GinkgoHelper()
		control := accept(p.control)
		next(control, (*srtmv1.BrokerMessage).GetHello)
		control.send(welcome("", 50*time.Millisecond)) // the state is as new as the last report
		return control
	}
	capture := func(topic string, lasts time.Duration) *srtmv1.ControllerMessage {
		return &srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Capture{
			Capture: &srtmv1.CaptureArrivals{Topic: topic, Lasts: durationpb.New(lasts)},
		}}
	}
	captured := func(topic string) func() bool { return func() bool { return node.Captured(topic) } }
	// collect joins pieces until so many messages are there.
	collect := func(s *controlSession, messages int) (all []agenttest.Arrival, lost uint64) {
		GinkgoHelper()
		var publishers []string
		for pieces := 0; len(all) < messages; pieces++ {
			a := next(s, (*srtmv1.BrokerMessage).GetArrivals)
			Expect(a.First).To(Equal(pieces == 0))
			publishers = append(publishers, a.Publishers...)
			lost += a.Lost
			at := mono.Wall(a.StartNs)
			for i, gap := range a.GapNs {
				at += mono.Wall(gap)
				all = append(all, agenttest.Arrival{At: at, Publisher: publishers[a.Publisher[i]]})
			}
		}
		return all, lost
	}
	metric := func(name string) float64 { return testkit.Metric(GinkgoTB(), registry, name) }

	It("brings what arrived piece by piece, and begins anew after its end", func() {
		node.Create("t")
		control := joined()
		messages := func() float64 { return metric("srtm_agent_captured_messages_total") }
		for sent := 0.0; sent < 20; sent += 10 {
			control.send(capture("t", time.Minute))
			Eventually(captured("t")).Should(BeTrue())
			Expect(metric("srtm_agent_captures")).To(BeEquivalentTo(1))
			Eventually(func() []string { return subject.State().Capturing }).WithTimeout(time.Minute).Should(Equal([]string{"t"}))

			all := []agenttest.Arrival{{At: 100, Publisher: "b"}, {At: 101, Publisher: ""}, {At: 101, Publisher: "b"}}
			Expect(node.Arrive("t", 1, all...)).To(BeTrue())
			Eventually(messages).Should(Equal(sent + 4))
			// In the meantime an older arrival of b was recorded, and another arrival.
			all = append(all, agenttest.Arrival{At: 90, Publisher: "b"}, agenttest.Arrival{At: 101, Publisher: "a"})
			Expect(node.Arrive("t", 2, all[3:]...)).To(BeTrue())
			Eventually(messages).Should(Equal(sent + 8))
			all = append(all, agenttest.Arrival{At: 300, Publisher: "a"}, agenttest.Arrival{At: 200, Publisher: ""})
			Expect(node.Arrive("t", 0, all[5:]...)).To(BeTrue())
			control.send(capture("t", 0))

			all[5], all[6] = all[6], all[5] // each piece is in order of arrival
			got, lost := collect(control, len(all))
			Expect(got).To(Equal(all))
			Expect(lost).To(BeEquivalentTo(3))
			Expect(messages()).To(Equal(sent + 10))
			Eventually(captured("t")).Should(BeFalse())
			Eventually(func() []string { return subject.State().Capturing }).WithTimeout(time.Minute).Should(BeEmpty())
			Expect(metric("srtm_agent_captures")).To(BeZero())
			control.send(prepare(1, "v"))
			Expect(result(control)).To(HaveField("Error", ""), "and skips empty pieces")
		}
	})

	It("is over when its time is, unless it is requested again", func() {
		node.Create("short")
		node.Create("long")
		control := joined()
		control.send(capture("long", time.Minute))
		control.send(capture("short", time.Minute))
		Eventually(captured("short")).Should(BeTrue())
		Expect(node.Arrive("short", 0, agenttest.Arrival{At: 1, Publisher: "p"})).To(BeTrue())
		control.send(capture("short", time.Millisecond))
		Eventually(captured("short")).Should(BeFalse())
		Expect(node.Captured("long")).To(BeTrue())

		control.send(capture("long", time.Millisecond))
		Eventually(captured("long")).Should(BeFalse())
	})

	It("begins anew when it is ended and requested again at once", func() {
		node.Create("t")
		control := joined()
		control.send(capture("t", time.Minute))
		Expect(next(control, (*srtmv1.BrokerMessage).GetArrivals).First).To(BeTrue())
		control.send(capture("t", 0))
		control.send(capture("t", time.Minute))
		Eventually(func() bool { return next(control, (*srtmv1.BrokerMessage).GetArrivals).First }).Should(BeTrue())
	})

	It("ends with the session, and with the topic", func() {
		node.Create("t")
		node.Create("u")
		control := joined()
		control.send(capture("t", time.Minute))
		control.send(capture("u", time.Minute))
		control.send(capture("unknown", time.Minute))
		control.send(prepare(1, "v")) // later messages are answered
		Expect(result(control)).To(HaveField("Error", ""))
		Eventually(func() []string { return subject.State().Capturing }).WithTimeout(time.Minute).Should(Equal([]string{"t", "u"}))

		node.Drop("u")
		Eventually(func() []string { return subject.State().Capturing }).WithTimeout(time.Minute).Should(Equal([]string{"t"}))
		control.end <- nil
		Eventually(captured("t")).Should(BeFalse())
		Eventually(func() []string { return subject.State().Capturing }).Should(BeEmpty())

		control = joined()
		control.send(capture("t", time.Minute))
		Eventually(captured("t")).Should(BeTrue())
		stop()
		Expect(node.Captured("t")).To(BeFalse(), "no session would take the record")
	})

	It("is not begun by nonsense", func() {
		node.Create("t")
		control := joined()
		for _, lasts := range []*durationpb.Duration{nil, durationpb.New(0), durationpb.New(-time.Second)} {
			control.send(&srtmv1.ControllerMessage{Message: &srtmv1.ControllerMessage_Capture{
				Capture: &srtmv1.CaptureArrivals{Topic: "t", Lasts: lasts},
			}})
		}
		control.send(prepare(1, "v"))
		Expect(result(control)).To(HaveField("Error", ""))
		Expect(node.Captured("t")).To(BeFalse())
	})
})
