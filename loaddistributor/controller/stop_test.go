package controller_test

import (
	"context"
	"sync/atomic"
	"testing/synctest"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/tbadaptor/adaptor"
)

// frozen is an adaptor that answers no call before the caller gives up, once the test freezes it.
type frozen struct {
	controller.Adaptor
	on atomic.Bool
}

func (f *frozen) wrap(a controller.Adaptor) controller.Adaptor { f.Adaptor = a; return f }

func (f *frozen) wait(ctx context.Context) error {
	if !f.on.Load() {
		return nil
	}
	<-ctx.Done()
	return status.FromContextError(ctx.Err()).Err()
}

func (f *frozen) Set(ctx context.Context, c *adaptor.Contract, mode adaptor.Mode) error {
	if err := f.wait(ctx); err != nil {
		return err
	}
	return f.Adaptor.Set(ctx, c, mode)
}

func (f *frozen) Remove(ctx context.Context, topic string, awaited, strict []string) (*srtmv1.TopicShares, error) {
	if err := f.wait(ctx); err != nil {
		return nil, err
	}
	return f.Adaptor.Remove(ctx, topic, awaited, strict)
}

func (f *frozen) Shares(ctx context.Context, topic string, unless uint64) (*srtmv1.ListSharesResponse, error) {
	if err := f.wait(ctx); err != nil {
		return nil, err
	}
	return f.Adaptor.Shares(ctx, topic, unless)
}

var _ = Describe("A controller that stops while its adaptor is frozen", func() {
	It("ends within 10 s, whatever it was about to do", func() {
		f := &frozen{}
		c := newCluster(setup{wrap: f.wrap, config: func(cfg *controller.Config) { cfg.PrepareTimeout = 30 * time.Second }})
		c.node("b1", 600)
		for _, name := range []string{"deleted", "updated", "idle"} {
			c.mustCreate(spec(name, 100, 10))
		}
		f.on.Store(true)
		began := make(chan struct{}, 3)
		atWork := func(do func() error) {
			go func() {
				defer GinkgoRecover()
				began <- struct{}{}
				Expect(status.Code(do())).NotTo(Equal(codes.OK))
			}()
		}
		atWork(func() error { _, err := c.update(spec("updated", 50, 5)); return err })
		atWork(func() error { _, _, err := c.create(context.Background(), spec("created", 50, 5), "key"); return err })
		go func() {
			defer GinkgoRecover()
			began <- struct{}{}
			_, _ = c.admin.DeleteTopic(context.Background(), &srtmv1.DeleteTopicRequest{Name: "deleted"})
		}()
		for range 3 {
			<-began
		}
		synctest.Wait()
		stopped := time.Now()
		c.stop()
		Expect(time.Since(stopped)).To(BeNumerically("<", 10*time.Second))
	})
})
