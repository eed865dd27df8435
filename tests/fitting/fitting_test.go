package fitting

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// The topic: groups whose publishers send a batch each at the same instants. The consumer takes one
// message of a broker at a time and holds it. So most of the groups' 40 simultaneous messages wait
// longer than the SLO allows, and the delay is the broker's alone. All delays are long compared with
// the noise of a busy machine.
const (
	topic, channel = "t", "c"
	groups, size   = 3, 10
	batch          = 4
	every          = 600 * time.Millisecond // a group sends
	hold           = 12 * time.Millisecond
	latency        = 300 * time.Millisecond
	brokers        = 5
)

func TestATopicIsNotSpreadForItsConsumers(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: a fit takes tens of seconds")
	}
	c := localtest.Start(t, brokers, []string{"--fitting=fast", "--report-interval=200ms", "--window=4s"}, "--mcap=200")
	tcp := map[string]string{}
	for i, d := range c.Brokers {
		tcp[fmt.Sprint("b", i+1)] = d.TCP
	}
	conn := localtest.Dial(t, c.RPC)
	admin := srtmv1.NewAdminServiceClient(conn)
	create(t, conn)

	// Consumers connect to each broker that gets the topic.
	consumed := map[string]bool{}
	status := func() *srtmv1.Topic {
		r := testkit.Result(admin.GetTopic(t.Context(), &srtmv1.GetTopicRequest{Name: topic, OmitPublishers: true})).Must(t)
		for _, q := range r.Topic.Quotas {
			if !consumed[q.BrokerId] {
				consumed[q.BrokerId] = true
				consume(t, tcp[q.BrokerId])
			}
		}
		return r.Topic
	}
	testkit.MustEqual(t, len(status().Quotas), 1, "brokers of the topic by its rate")
	publish(t, c.RPC)

	var fitted *srtmv1.Topic
	testkit.WaitFor(t, "end of the fit", func() bool {
		fitted = status()
		return fitted.GetStatus().GetFit().GetEnded()
	})
	fit := fitted.Status.Fit
	t.Logf("after %v on %d brokers: %s; tried %v", fit.Took.AsDuration(), len(fitted.Quotas), fitted.Status.Fitting, fit.Rounds)
	if !fit.Fitted || len(fitted.Quotas) != 1 {
		t.Fatalf("on %d brokers, %s", len(fitted.Quotas), fitted.Status.Fitting)
	}
	if l, err := obs.LatencyFromProto(fitted.Status.Pooled.GetConsumer()); err != nil || l.Quantile(0.9) < latency {
		t.Errorf("p90 of waiting for the consumer is %v, %v", l.Quantile(0.9), err)
	}
	// When the deliveries before the last move have left the window, the SLO is kept, and the topic
	// stays in place.
	testkit.WaitFor(t, "topic that keeps its SLO", func() bool {
		now := status()
		return now.GetStatus().GetSloMet() && now.State == srtmv1.TopicState_TOPIC_STATE_ACTIVE
	})
	if now := status(); now.Epoch != fitted.Epoch {
		t.Errorf("it has moved since it was fitted: epoch %d, then %d", fitted.Epoch, now.Epoch)
	}
}

func create(t *testing.T, conn grpc.ClientConnInterface) {
	t.Helper()
	spec := &srtmv1.TopicSpec{
		Name: topic, Channels: []string{channel}, ShareRule: "static",
		Contract: &srtmv1.Contract{RateMilli: 80_000, Burst: 400, Slo: &srtmv1.Slo{Quantile: 0.9, Latency: durationpb.New(latency)}},
	}
	for g := range groups {
		spec.Groups = append(spec.Groups, &srtmv1.PublisherGroup{Key: fmt.Sprint("g", g), Count: size, Rate: batch / (groups * every.Seconds()), Batch: batch})
	}
	testkit.Result(localtest.CreateTopic(t.Context(), conn, &srtmv1.CreateTopicRequest{Spec: spec})).Must(t)
}

// publish lets one group after the other send, until the test ends.
func publish(t *testing.T, rpc string) {
	t.Helper()
	c, err := client.New(client.Config{Address: rpc})
	testkit.Must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var sending sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		sending.Wait()
		over, done := context.WithTimeout(context.Background(), local.Patience)
		defer done()
		testkit.NoError(t, c.Close(over))
	})
	bodies := make([][]byte, batch)
	for i := range bodies {
		bodies[i] = make([]byte, 100)
	}
	all := make([][]*client.Publisher, groups)
	for g := range groups {
		for i := range size {
			opening, done := context.WithTimeout(ctx, local.Patience)
			p, err := c.Publisher(opening, topic, fmt.Sprintf("g%d.%d", g, i))
			done()
			testkit.Must(t, err)
			all[g] = append(all[g], p)
		}
	}
	sending.Go(func() {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for g := 0; ; g = (g + 1) % groups {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
			for _, p := range all[g] {
				sending.Go(func() {
					if err := p.MultiPublish(ctx, bodies); err != nil && ctx.Err() == nil {
						t.Error(err)
					}
				})
			}
		}
	})
}

// consume takes one message at a time from a broker and holds it.
func consume(t *testing.T, address string) {
	t.Helper()
	localtest.Consume(t, topic, channel, nsq.HandlerFunc(func(*nsq.Message) error {
		timer := time.NewTimer(hold)
		defer timer.Stop()
		<-timer.C
		return nil
	}), func(c *nsq.Config) { c.MaxInFlight = 1 }, address)
}
