package failover

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/testkit"
)

// pace makes each of several publishers of a topic send a message at every tick: each messages, and
// more until had reports that the test has had enough time (nil: it has). The returned channel then
// gives how many messages each publisher has sent.
func pace(t *testing.T, cl *client.Client, topic string, publishers, each int, tick time.Duration, had func() bool) <-chan []int {
	t.Helper()
	var working sync.WaitGroup
	sent := make([]int, publishers)
	for i := range publishers {
		p := publisher(t, cl, topic, i)
		working.Go(func() {
			ticker := time.NewTicker(tick)
			defer ticker.Stop()
			for n := 0; n < each || had != nil && !had() && n < 100*each; n++ {
				<-ticker.C
				sent[i]++
				if err := p.Publish(t.Context(), body(i, n)); err != nil {
					t.Errorf("publisher %d, message %d: %v", i, n, err)
					return
				}
			}
		})
	}
	done := make(chan []int, 1)
	go func() { working.Wait(); done <- sent }()
	return done
}

// finish closes the client and waits until all is delivered.
func finish(t *testing.T, cl *client.Client, all *consumer, sent []int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	testkit.NoError(t, cl.Close(ctx))
	messages := 0
	for _, n := range sent {
		messages += n
	}
	testkit.WaitFor(t, fmt.Sprintf("%d messages are delivered", messages), func() bool { return all.count() >= messages })
}

// A topic's r, b, SLO and the size of its group change all the time, up and down, while messages flow.
// Nothing is lost, duplicated or out of order, no release exceeds the largest contract, and the last
// contract remains.
func TestATopicIsUpdatedUnderLoad(t *testing.T) {
	const publishers, each = 10, 200
	c := newCluster(t, 1, 3, "--store=bbolt")
	spec := func(rate, burst int64, count int32, latency time.Duration) *srtmv1.TopicSpec {
		s := contract("t", rate, burst, count)
		s.Groups[0].Rate = 10
		s.Contract.Slo.Latency = durationpb.New(latency)
		return s
	}
	const most, deepest = 4000, 400
	specs := []*srtmv1.TopicSpec{
		spec(most, 100, publishers, 10*time.Millisecond),
		spec(1500, deepest, 3*publishers, 10*time.Millisecond),
		spec(2000, 50, publishers, 50*time.Millisecond),
		spec(most, 50, 2*publishers, 5*time.Millisecond),
	}
	c.create(specs[0])
	all := c.consume("t")
	cl := newClient(t, c)
	var updates atomic.Int32
	done := pace(t, cl, "t", publishers, each, 10*time.Millisecond, func() bool { return int(updates.Load()) >= len(specs) })
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	var last *srtmv1.TopicSpec
	var sent []int
	for sent == nil {
		select {
		case sent = <-done:
		case <-ticker.C:
			n := int(updates.Add(1))
			last = specs[n%len(specs)]
			if _, err := ask(c, srtmv1.AdminServiceClient.UpdateTopic, &srtmv1.UpdateTopicRequest{Spec: last}); err != nil {
				t.Errorf("update %d: %v", n, err)
			}
		}
	}
	if n := int(updates.Load()); n < len(specs) {
		t.Fatalf("only %d updates while messages were published", n)
	}
	finish(t, cl, all, sent)
	all.once(t, sent)
	is, want := c.topic("t").GetSpec(), last
	if is.GetContract().GetRateMilli() != want.Contract.RateMilli || is.GetContract().GetBurst() != want.Contract.Burst ||
		is.GetContract().GetSlo().GetLatency().AsDuration() != want.Contract.Slo.Latency.AsDuration() || len(is.GetGroups()) != 1 || is.Groups[0].GetCount() != want.Groups[0].Count {
		t.Errorf("it is %v, want %v", is, want)
	}
	t.Logf("%d updates, %d releases within %d msg/s, burst %d", updates.Load(), c.envelope("t", most, deepest), most, deepest)
}

// A topic with one token moves from broker to broker. The token follows once the old broker's backlog
// is released, and the contract is never exceeded. This also holds if the loaddistributor is killed
// after each move and has forgotten who has the token.
func TestATopicWithOneTokenMoves(t *testing.T) {
	for name, killed := range map[string]bool{"in peace": false, "and the loaddistributor is killed": true} {
		t.Run(name, func(t *testing.T) {
			const publishers, each, rate, burst = 4, 200, 1000, 1
			c := newCluster(t, 1, 3, "--store=bbolt")
			c.create(contract("t", rate, burst, publishers))
			all := c.consume("t")
			cl := newClient(t, c)
			var moves atomic.Int32
			done := pace(t, cl, "t", publishers, each, 20*time.Millisecond, func() bool { return moves.Load() >= 3 })
			var ids []string
			for i := range publishers {
				ids = append(ids, fmt.Sprintf("g.%d", i))
			}
			ticker := time.NewTicker(time.Second)
			defer ticker.Stop()
			var sent []int
			for sent == nil {
				select {
				case sent = <-done:
				case <-ticker.C:
					n := moves.Load()
					to := fmt.Sprintf("b%d", 1+(n+1)%3)
					testkit.WaitFor(t, fmt.Sprintf("move %d to %s is done", n, to), func() bool {
						err := c.move(ids, to)
						if err != nil {
							t.Logf("move %d to %s: %v", n, to, err)
						}
						return err == nil
					})
					if moves.Add(1); killed {
						c.kill(0)
						c.start(0)
					}
				}
			}
			if n := moves.Load(); n < 3 {
				t.Fatalf("only %d moves while messages were published", n)
			}
			finish(t, cl, all, sent)
			all.once(t, sent)
			t.Logf("%d moves, %d releases within %d msg/s, burst %d", moves.Load(), c.envelope("t", rate, burst), rate, burst)
		})
	}
}
