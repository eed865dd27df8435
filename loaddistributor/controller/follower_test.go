package controller_test

import (
	"context"
	"errors"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
)

var _ = Describe("A follower", func() {
	It("does not deny what it has not read yet", func() {
		c, err := controller.NewFollower(controller.Config{
			ReportInterval: time.Second, PrepareTimeout: time.Second, Window: time.Second, Log: logger(),
		}, nil, func() string { return "" })
		Expect(err).NotTo(HaveOccurred())
		asks := func() (errs []error) {
			_, topic := c.View().Topic("t")
			_, resolved := c.View().Resolve("t", "p")
			watched := c.View().Watch(context.Background(), "t", nil, func(controller.Change) error { return nil })
			return []error{topic, resolved, watched}
		}
		Expect(c.View().Ready()).To(MatchError(catalog.ErrUnread))
		Expect(asks()).To(HaveEach(MatchError(catalog.ErrUnread)))
		informed, changed := c.View().Informed()
		Expect(informed).To(BeFalse())
		c.Cut(errors.New("of no news to it"))
		c.Reset(catalog.New())
		c.Reset(catalog.New()) // as after an outage of the store
		Expect(changed).To(BeClosed())
		informed, changed = c.View().Informed()
		Expect(informed).To(BeTrue())
		Expect(c.View().Ready()).To(Succeed())
		Expect(asks()).To(HaveEach(MatchError(catalog.ErrTopicUnknown)))
		// The part that it can no longer read may contain news.
		c.Cut(errors.New("the store is unavailable"))
		Expect(changed).To(BeClosed())
		informed, _ = c.View().Informed()
		Expect(informed).To(BeFalse())
		Expect(asks()).To(HaveEach(MatchError(catalog.ErrUnread)))
		c.Reset(catalog.New())
		informed, _ = c.View().Informed()
		Expect(informed).To(BeTrue())
	})
})
