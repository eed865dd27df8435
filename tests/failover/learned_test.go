package failover

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/etcdtest"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// known returns the publishers of a topic that the leader has learned, by their ids.
func (c *cluster) known(topic string) (all map[string]*srtmv1.LearnedPublisher, count uint32) {
	all = map[string]*srtmv1.LearnedPublisher{}
	l := c.topic(topic).GetLearned()
	for _, p := range l.GetPublishers() {
		all[p.GetId()] = p
	}
	return all, l.GetCount()
}

// The stock publishers of an open topic, which declare nothing, are learned. Learned publishers stay
// known when the leader and a broker are killed. Thousands of invented identities are not learned, and
// move no publisher.
func TestWhatWasLearnedOutlivesTheLeader(t *testing.T) {
	t.Parallel()
	e := etcdtest.Start(t, etcdtest.Config{})
	c := newCluster(t, 2, 2, "--store=etcd", "--etcd-endpoint="+e.URL, "--etcd-lease=1s", "--flex-lease=600ms", "--clock-bound=100ms")
	const topic = "open"
	create := contract(topic, 1000, 100, 0)
	create.Groups, create.PlacementPolicy = nil, "loadbalance"
	c.create(create)

	ids := []string{"s-0", "s-1", "s-2", "s-3"}
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer stop()
	for i, id := range ids {
		address := c.brokers[i%2].TCP
		all.Go(func() {
			var p *nsq.Producer // nil while the broker is down: go-nsq has a race when such a producer is used again
			defer func() {
				if p != nil {
					p.Stop()
				}
			}()
			tick := time.NewTicker(time.Duration(20+10*i) * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
				if p == nil {
					p, _ = localtest.NewProducer(address, id)
				}
				if p != nil && p.Publish(topic, []byte("x")) != nil {
					p.Stop()
					p = nil
				}
			}
		})
	}

	localtest.Consume(t, topic, "all", nsq.HandlerFunc(func(*nsq.Message) error { return nil }), nil, c.lookups()...)
	var before map[string]*srtmv1.LearnedPublisher
	testkit.WaitFor(t, "the topic is placed by the publishers that were learned", func() bool {
		before, _ = c.known(topic)
		return len(before) == len(ids) && !slices.ContainsFunc(ids, func(id string) bool {
			return before[id].GetBrokerId() == "" || before[id].GetBrokerId() != before[id].GetSendsTo()
		})
	})
	if a, b := before["s-0"].GetRate(), before["s-3"].GetRate(); !(a > b) {
		t.Errorf("who publishes every 20 ms has rate %v, every 50 ms %v", a, b)
	}
	same := func(what string, placed bool) {
		t.Helper()
		var now map[string]*srtmv1.LearnedPublisher
		var count uint32
		testkit.WaitFor(t, what+": what was learned is known", func() bool {
			now, count = c.known(topic)
			return count > 0
		})
		if got := slices.Sorted(maps.Keys(now)); !slices.Equal(got, ids) || int(count) != len(ids) {
			t.Errorf("%s: %d are known: %q", what, count, got[:min(20, len(got))])
		}
		for _, id := range ids {
			if b, n := before[id], now[id]; n.GetSince().GetSeconds() != b.GetSince().GetSeconds() || placed && n.GetBrokerId() != b.GetBrokerId() {
				t.Errorf("%s: %s was %v, is %v", what, id, b, n)
			}
		}
	}
	heardAgain := func(what string) {
		t.Helper()
		from := time.Now()
		testkit.WaitFor(t, what+": publishers are seen", func() bool {
			now, _ := c.known(topic)
			return !slices.ContainsFunc(ids, func(id string) bool { return !now[id].GetLastHeard().AsTime().After(from) })
		})
		same(what, false) // after b1's long absence, others may have got its publishers
	}

	c.kill(0) // this process was the first leader
	same("another leads", true)
	c.start(0)
	b := c.brokers[0]
	testkit.Must(t, b.Kill())
	back, err := local.NSQDAt(c.release.nsqd, b.Dir, b.TCP, b.HTTP, b.Flags...)
	c.brokers[0] = localtest.Watch(t, back, err)

	// Each of these identities is seen once, or twice by chance.
	rng := rand.New(rand.NewPCG(1, 2))
	for n := range 3000 {
		p, err := localtest.NewProducer(c.brokers[n%2].TCP, fmt.Sprintf("hostile-%d", rng.Uint64()))
		if err == nil {
			err = p.Publish(topic, []byte("x"))
			p.Stop()
		}
		if err != nil && n%2 == 1 { // the broker that was not killed
			t.Fatal(err)
		}
	}
	heardAgain("a broker is back, and thousands of identities came")
	var moved *srtmv1.ListPublisherMovesResponse
	testkit.Must(t, c.each(func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		moved, err = srtmv1.NewAdminServiceClient(conn).ListPublisherMoves(ctx, &srtmv1.ListPublisherMovesRequest{Topic: topic})
		return err
	}))
	for _, m := range moved.GetMoves() {
		if !strings.HasPrefix(m.GetPublisherId(), "s-") {
			t.Errorf("%v", m)
		}
	}
}
