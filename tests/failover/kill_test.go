package failover

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/etcdtest"
)

// operator sends admin requests one after the other, and records what was acknowledged.
type operator struct {
	c     *cluster
	there map[string]bool // topics with an acknowledged creation
	gone  map[string]bool // topics with an acknowledged deletion
	count atomic.Int64    // acknowledged requests
}

// work creates topics, and deletes every third topic, until ctx ends.
func (o *operator) work(ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		name := fmt.Sprintf("topic%d", n)
		if !o.until(ctx, func() error { return o.c.tryCreate(contract(name, 10, 10, 2)) }) {
			return
		}
		o.there[name] = true
		if n%3 != 0 {
			continue
		}
		// From now on the topic may be gone, whether or not the deletion is acknowledged.
		delete(o.there, name)
		if !o.until(ctx, func() error {
			_, err := ask(o.c, srtmv1.AdminServiceClient.DeleteTopic, &srtmv1.DeleteTopicRequest{Name: name})
			if status.Code(err) == codes.NotFound {
				return nil // deleted by an earlier attempt whose answer was lost
			}
			return err
		}) {
			return
		}
		o.gone[name] = true
	}
}

// until repeats a request until it is acknowledged; false: ctx has ended before.
func (o *operator) until(ctx context.Context, do func() error) bool {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for ctx.Err() == nil {
		if do() == nil {
			o.count.Add(1)
			return true
		}
		<-ticker.C
	}
	return false
}

// load publishes more than the contract allows, without a pause, and counts failures.
type load struct {
	topic      string
	publishers int
	sent       atomic.Int64
	failed     atomic.Int64
	longest    atomic.Int64 // wait for an OK, ns
}

// run starts the load, and returns a function that waits for its end. The load ends with ctx.
func (l *load) run(ctx context.Context, t *testing.T, c *cluster, every time.Duration) (wait func()) {
	cl := newClient(t, c)
	var working sync.WaitGroup
	for i := range l.publishers {
		p := publisher(t, cl, l.topic, i)
		working.Go(func() {
			ticker := time.NewTicker(every)
			defer ticker.Stop()
			for n := 0; ctx.Err() == nil; n++ {
				at := time.Now()
				if err := p.Publish(context.Background(), body(i, n)); err != nil {
					t.Errorf("publisher %d, message %d: %v", i, n, err)
					l.failed.Add(1)
				}
				l.sent.Add(1)
				if took := int64(time.Since(at)); took > l.longest.Load() {
					l.longest.Store(took) // racing updates are equally good
				}
				<-ticker.C
			}
		})
	}
	return func() {
		working.Wait()
		end, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		testkit.NoError(t, cl.Close(end))
	}
}

// pause waits for a random time.
func pause(rng *rand.Rand, from, to time.Duration) {
	timer := time.NewTimer(from + time.Duration(rng.Int64N(int64(to-from))))
	<-timer.C
}

const (
	loadRate, loadBurst = 200, 20 // of the contract; the load is several times the rate
	loadEvery           = 10 * time.Millisecond
	loadPublishers      = 10
)

// underLoad runs kill, which ends in good time, while requests and messages continue, and then checks
// the result.
func underLoad(t *testing.T, c *cluster, kill func()) {
	c.create(contract("load", loadRate, loadBurst, loadPublishers))
	all := c.consume("load")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	l := &load{topic: "load", publishers: loadPublishers}
	wait := l.run(ctx, t, c, loadEvery)
	o := &operator{c: c, there: map[string]bool{}, gone: map[string]bool{}}
	var operating sync.WaitGroup
	operating.Go(func() { o.work(ctx) })

	kill()
	before := o.count.Load()
	testkit.WaitFor(t, "requests are acknowledged afterwards", func() bool { return o.count.Load() >= before+3 })
	cancel()
	operating.Wait()
	wait()

	// No acknowledged request is forgotten.
	testkit.WaitFor(t, "all topics are as acknowledged", func() bool {
		seen := map[string]bool{}
		err := c.each(func(ctx context.Context, conn *grpc.ClientConn) error {
			// Only the leader may report this, because a follower may be behind.
			admin := srtmv1.NewAdminServiceClient(conn)
			if _, err := admin.DrainBroker(ctx, &srtmv1.DrainBrokerRequest{BrokerId: "b1", Undo: true}); err != nil {
				return err
			}
			r, err := admin.ListTopics(ctx, &srtmv1.ListTopicsRequest{PageSize: 1000})
			for _, topic := range r.GetTopics() {
				// Degraded counts as active: the load is beyond the contract, so its messages are
				// late.
				if topic.State == srtmv1.TopicState_TOPIC_STATE_ACTIVE || topic.State == srtmv1.TopicState_TOPIC_STATE_DEGRADED {
					seen[topic.Spec.Name] = true
				}
			}
			return err
		})
		if err != nil || !seen["load"] {
			return false
		}
		for name := range o.there {
			if !seen[name] {
				return false
			}
		}
		for name := range o.gone {
			if seen[name] {
				t.Fatalf("topic %s was deleted, and is there", name)
			}
		}
		return true
	})
	// The data path was not affected.
	sent := int(l.sent.Load())
	testkit.WaitFor(t, "most of what the contract lets through is delivered", func() bool { return all.count() > 0 })
	releases := c.envelope("load", loadRate, loadBurst)
	if releases == 0 || releases > sent || l.failed.Load() > 0 {
		t.Errorf("%d of %d publishes failed, %d messages were released", l.failed.Load(), sent, releases)
	}
	t.Logf("%d requests acknowledged, %d topics kept, %d deleted; %d publishes, none failed, longest wait %v; %d releases within the contract",
		o.count.Load(), len(o.there), len(o.gone), sent, time.Duration(l.longest.Load()), releases)
}

func TestTheOnlyLoadDistributorIsKilled(t *testing.T) {
	rng := testkit.Rand(t)
	c := newCluster(t, 1, 2, "--store=bbolt")
	underLoad(t, c, func() {
		for range 4 {
			pause(rng, 100*time.Millisecond, time.Second)
			c.kill(0)
			pause(rng, time.Millisecond, 300*time.Millisecond)
			c.start(0)
		}
	})
}

func TestLeadersAndTheStoreAreKilled(t *testing.T) {
	rng := testkit.Rand(t)
	e := etcdtest.Start(t, etcdtest.Config{})
	c := newCluster(t, 2, 2, "--store=etcd", "--etcd-endpoint="+e.URL, "--etcd-lease=1s", "--flex-lease=600ms", "--clock-bound=100ms")
	underLoad(t, c, func() {
		for round := range 3 {
			pause(rng, 200*time.Millisecond, 1500*time.Millisecond)
			switch round % 3 {
			case 0: // any of the loaddistributors, leader or not
				i := rng.IntN(2)
				c.kill(i)
				pause(rng, 100*time.Millisecond, 3*time.Second)
				c.start(i)
			case 1:
				e.Stop()
				pause(rng, 100*time.Millisecond, 2*time.Second)
				e.Restart()
			case 2: // everything but the brokers
				e.Stop()
				c.kill(0)
				c.kill(1)
				pause(rng, 100*time.Millisecond, time.Second)
				e.Restart()
				c.start(0)
				c.start(1)
			}
		}
	})
}
