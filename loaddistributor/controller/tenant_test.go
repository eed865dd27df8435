package controller_test

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/tokenbucket"
)

// topicOf creates a topic of a tenant; "": an operator's.
func (c *cluster) topicOf(tenant, name string) {
	GinkgoHelper()
	_, err := c.control.Create(context.Background(), &catalog.Spec{
		Demand: placement.Demand{Topic: name, Rate: 10, RateMilli: 10_000, Burst: 5, Groups: []placement.Group{{Key: "g", Count: 4, Rate: 1}}},
		SLO:    catalog.SLO{Quantile: 0.99, Latency: time.Second}, Policy: placement.SRTM, ShareRule: "static", Channels: []string{"main"}, Tenant: tenant,
	}, "", "", func(controller.Progress) error { return nil })
	Expect(err).NotTo(HaveOccurred())
}

var _ = Describe("A tenant", func() {
	It("changes its own topics alone", func() {
		c := newCluster(setup{config: func(cfg *controller.Config) {
			cfg.TenantRates = map[string]tokenbucket.Rate{"acme": tokenbucket.PerSecond(30)}
		}})
		c.node("b1", 1000)
		for _, tenant := range []string{"", "acme", "other"} {
			c.topicOf(tenant, "of-"+tenant)
		}
		s := rpc.New(c.control)
		calls := map[string]func(ctx context.Context, topic string) error{
			"update": func(ctx context.Context, topic string) error {
				_, err := s.UpdateTopic(ctx, masked(0, &srtmv1.TopicSpec{Name: topic, Contract: &srtmv1.Contract{RateMilli: 20_000}}, "contract.rate_milli"))
				return err
			},
			"move": func(ctx context.Context, topic string) error {
				_, err := s.MovePublishers(ctx, &srtmv1.MovePublishersRequest{Topic: topic, BrokerId: "b1", PublisherIds: []string{"g.0"}})
				return err
			},
			"seek": func(ctx context.Context, topic string) error {
				_, err := s.SeekChannel(ctx, &srtmv1.SeekChannelRequest{Topic: topic, Channel: "main", To: &srtmv1.Place{To: &srtmv1.Place_End{End: &emptypb.Empty{}}}})
				return err
			},
			"create a channel": func(ctx context.Context, topic string) error {
				_, err := s.CreateChannel(ctx, &srtmv1.CreateChannelRequest{Topic: topic, Channel: "more"})
				return err
			},
			"empty": func(ctx context.Context, topic string) error {
				_, err := s.EmptyChannel(ctx, &srtmv1.EmptyChannelRequest{Topic: topic, Channel: "main"})
				return err
			},
			"delete": func(ctx context.Context, topic string) error {
				_, err := s.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: topic})
				return err
			},
		}
		acme := secure.WithTenant(context.Background(), "acme")
		for name, call := range calls {
			Expect(call(acme, "of-")).To(failsWith(codes.PermissionDenied), name)
			Expect(call(acme, "of-other")).To(failsWith(codes.PermissionDenied), name)
			Expect(call(acme, "none")).NotTo(failsWith(codes.PermissionDenied), name)
		}
		Expect(c.topic("of-").Spec.Contract.RateMilli).To(BeEquivalentTo(10_000))
		for _, name := range []string{"update", "move", "seek", "create a channel", "empty", "delete"} {
			Expect(calls[name](acme, "of-acme")).To(Succeed(), name)
			Expect(calls[name](context.Background(), "of-other")).To(Succeed(), "an operator's "+name)
		}
	})
})
