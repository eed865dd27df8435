package controller_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/nsqd/agent/agenttest"
)

var _ = Describe("The admin service", func() {
	It("refuses a bad request with all its faults, and nothing is created", func() {
		c := newCluster(setup{})
		b := c.join("b1", 100, agenttest.New())
		bad := spec("no/name", 0, 0)
		bad.Contract.Slo.Quantile = 1.5
		bad.PlacementPolicy = "best"
		_, steps, err := c.create(context.Background(), bad, strings.Repeat("k", 129))
		Expect(steps).To(BeEmpty())
		Expect(err).To(fails(codes.InvalidArgument, rpc.ReasonBadRequest))
		var fields []string
		for _, d := range status.Convert(err).Details() {
			if v, ok := d.(*errdetails.BadRequest); ok {
				for _, one := range v.FieldViolations {
					Expect(one.Description).NotTo(BeEmpty())
					fields = append(fields, one.Field)
				}
			}
		}
		Expect(fields).To(Equal([]string{
			"idempotency_key", "spec.name", "spec.contract.rate_milli", "spec.contract.burst",
			"spec.contract.slo.quantile", "spec.groups[0].count", "spec.placement_policy",
		}))
		list, err := c.admin.ListTopics(context.Background(), &srtmv1.ListTopicsRequest{})
		Expect(err).NotTo(HaveOccurred())
		Expect(list.Topics).To(BeEmpty())
		Expect(b.node.Topics()).To(BeEmpty())
	})

	It("lists topics in pages, and shows one with or without its publishers", func() {
		c := newCluster(setup{})
		c.join("b1", 1000, agenttest.New())
		for i := range 5 {
			s := spec(fmt.Sprintf("t%d", i), 10, 5)
			s.Groups = nil
			s.Publishers = []*srtmv1.Publisher{{Id: "p", Rate: 1}}
			c.mustCreate(s)
		}
		var names []string
		pages := 0
		for token := ""; ; pages++ {
			page, err := c.admin.ListTopics(context.Background(), &srtmv1.ListTopicsRequest{PageSize: 2, PageToken: token})
			Expect(err).NotTo(HaveOccurred())
			for _, t := range page.Topics {
				names = append(names, t.Spec.Name)
				Expect(t.Spec.Publishers).To(BeEmpty())
				Expect(t.Status).To(BeNil())
			}
			if token = page.NextPageToken; token == "" {
				break
			}
		}
		Expect(names).To(Equal([]string{"t0", "t1", "t2", "t3", "t4"}))
		Expect(pages).To(Equal(2))
		Expect(c.admin.ListTopics(context.Background(), &srtmv1.ListTopicsRequest{PageSize: -1, PageToken: "!"})).Error().To(fails(codes.InvalidArgument, rpc.ReasonBadRequest))

		Expect(c.topic("t1").Spec.Publishers).To(HaveLen(1))
		lean, err := c.admin.GetTopic(context.Background(), &srtmv1.GetTopicRequest{Name: "t1", OmitPublishers: true})
		Expect(err).NotTo(HaveOccurred())
		Expect(lean.Topic.Spec.Publishers).To(BeEmpty())
		Expect(lean.Topic.Status.Brokers).To(HaveLen(1))
		Expect(c.admin.GetTopic(context.Background(), &srtmv1.GetTopicRequest{Name: "t9"})).Error().To(fails(codes.NotFound, rpc.ReasonTopicUnknown))
	})

	It("lists brokers by id, in pages if the request has a page size", func() {
		c := newCluster(setup{})
		for i := range 5 {
			c.join(fmt.Sprint("b", i), 100, agenttest.New())
		}
		Expect(c.brokers()).To(HaveLen(5))
		var ids []string
		var sizes []int
		for token, more := "", true; more; more = token != "" {
			r, err := c.admin.ListBrokers(context.Background(), &srtmv1.ListBrokersRequest{PageSize: 2, PageToken: token})
			Expect(err).NotTo(HaveOccurred())
			for _, b := range r.Brokers {
				ids = append(ids, b.Id)
			}
			sizes, token = append(sizes, len(r.Brokers)), r.NextPageToken
		}
		Expect(ids).To(Equal([]string{"b0", "b1", "b2", "b3", "b4"}))
		Expect(sizes).To(Equal([]int{2, 2, 1}))
		for _, bad := range []*srtmv1.ListBrokersRequest{{PageSize: -1}, {PageSize: 1001}, {PageToken: "!"}} {
			Expect(c.admin.ListBrokers(context.Background(), bad)).Error().To(fails(codes.InvalidArgument, rpc.ReasonBadRequest))
		}
	})

	It("pages the publishers of a topic", func() {
		c := newCluster(setup{})
		c.join("b1", 1000, agenttest.New())
		s := spec("t", 10, 5)
		s.Groups = nil
		for i := range 5 {
			s.Publishers = append(s.Publishers, &srtmv1.Publisher{Id: fmt.Sprint("a b:", i), Rate: 1})
		}
		c.mustCreate(s)
		page := func(size int32, token string) (*srtmv1.GetTopicResponse, error) {
			return c.admin.GetTopic(context.Background(), &srtmv1.GetTopicRequest{Name: "t", PageSize: size, PageToken: token})
		}
		var ids, tokens []string
		for token := ""; ; {
			r, err := page(2, token)
			Expect(err).NotTo(HaveOccurred())
			Expect(r.Topic.Epoch).To(BeNumerically(">", 0))
			Expect(r.Topic.Status != nil).To(Equal(token == ""), "what is not publishers is on the first page")
			for _, one := range r.Topic.Spec.Publishers {
				ids = append(ids, one.Id)
			}
			if token = r.NextPageToken; token == "" {
				break
			}
			tokens = append(tokens, token)
		}
		Expect(ids).To(Equal([]string{"a b:0", "a b:1", "a b:2", "a b:3", "a b:4"}))
		Expect(tokens).To(HaveLen(2))

		By("refusing what is no page")
		for _, r := range []*srtmv1.GetTopicRequest{{PageSize: -1}, {PageSize: 10_001}, {PageToken: "!"}, {PageToken: "MA"}, {PageToken: base64.RawURLEncoding.EncodeToString([]byte("-1 1 a"))}} {
			r.Name = "t"
			Expect(c.admin.GetTopic(context.Background(), r)).Error().To(fails(codes.InvalidArgument, rpc.ReasonBadRequest))
		}

		By("saying that the publishers have changed")
		s = proto.CloneOf(s)
		s.Publishers = s.Publishers[2:]
		_, err := c.admin.UpdateTopic(context.Background(), &srtmv1.UpdateTopicRequest{Spec: s})
		Expect(err).NotTo(HaveOccurred())
		Expect(page(2, tokens[0])).Error().To(fails(codes.Aborted, rpc.ReasonTopicChanged))
		Expect(page(2, tokens[1])).Error().To(fails(codes.Aborted, rpc.ReasonTopicChanged))
	})

	It("carries a topic with more publishers than one message holds by default", func() {
		c := newCluster(setup{})
		c.join("b1", 1_000_000, agenttest.New())
		s := spec("t", 100_000, 100)
		s.Groups = nil
		for i := range 35_000 {
			s.Publishers = append(s.Publishers, &srtmv1.Publisher{
				Id: fmt.Sprintf("%s-%05d", strings.Repeat("sensor", 9), i), CorrelationKey: strings.Repeat("k", 60), Rate: 1,
			})
		}
		Expect(proto.Size(s)).To(BeNumerically(">", 4<<20))
		c.mustCreate(s)
		a, err := c.control.View().Resolve("t", s.Publishers[34_999].Id)
		Expect(err).NotTo(HaveOccurred())
		Expect(a.Broker).To(Equal("b1"))
	})
})

var _ = Describe("The metrics", func() {
	It("show brokers, topics by state, and the window, with bounded labels", func() {
		reg := prometheus.NewRegistry()
		c := newCluster(setup{config: func(cfg *controller.Config) { cfg.Metrics = reg }})
		b1 := c.join("b1", 60, agenttest.New())
		c.join("b2", 60, agenttest.New())
		c.mustCreate(spec("t", 50, 10))
		h := histogram.NewLatency()
		for range 10 {
			h.Record(2 * time.Millisecond)
		}
		b1.node.Measure("t", &srtmv1.TopicStats{Delivered: 10, Exceeded: 3, Delivery: obs.LatencyProto(h), DeliveryAccess: []float64{2.5}})
		read := func() map[string]float64 {
			families, err := reg.Gather()
			Expect(err).NotTo(HaveOccurred())
			values := map[string]float64{}
			for _, f := range families {
				for _, m := range f.Metric {
					name := f.GetName()
					for _, l := range m.Label {
						name += " " + l.GetValue()
					}
					values[name] = m.GetGauge().GetValue()
				}
			}
			return values
		}
		Eventually(func() float64 { return read()["srtm_topics degraded"] }).Should(Equal(1.0))
		values := read()
		Expect(values["srtm_topic_window_exceeded_messages t"] / values["srtm_topic_window_delivered_messages t"]).To(Equal(0.3))
		Expect(values).To(HaveKeyWithValue("srtm_topic_slo_met t", 0.0))
		Expect(values).To(HaveKeyWithValue("srtm_topic_p99_access_ratio t", 0.25))
		Expect(values).To(HaveKeyWithValue("srtm_brokers_connected", 2.0))
		Expect(values).To(HaveKeyWithValue("srtm_brokers_mcap_messages_per_second", 120.0))
		Expect(values).To(HaveKeyWithValue("srtm_brokers_allocated_messages_per_second", 50.0))
		Expect(values).To(HaveKeyWithValue("srtm_topics_without_series", 0.0))
	})
})

var _ = Describe("A configuration", func() {
	It("is refused with all its faults", func() {
		_, err := controller.New(controller.Config{ReportInterval: time.Hour, PrepareTimeout: 0, Window: time.Minute}, nil)
		Expect(err).To(HaveOccurred())
		for _, part := range []string{"--report-interval 1h", "--prepare-timeout 0s", "at least the 1h0m0s of --report-interval", "no logger"} {
			Expect(err.Error()).To(ContainSubstring(part))
		}
	})
})
