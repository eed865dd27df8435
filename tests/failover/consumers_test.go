package failover

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

// reader is a stock consumer that queries nsqlookupd at the start, and when a connection ends.
type reader struct {
	mu      sync.Mutex
	dialled map[string]int64 // time of the first dial, ns, by broker
	first   map[string]int64 // time at which the first of the broker's messages was accepted, ns, by broker
	got     map[string]int   // by body
	again   int
}

func (r *reader) HandleMessage(m *nsq.Message) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.Attempts > 1 {
		r.again++
	}
	r.got[string(m.Body)]++
	if at, seen := r.first[m.NSQDAddress]; !seen || m.Timestamp < at {
		r.first[m.NSQDAddress] = m.Timestamp
	}
	return nil
}

// Write takes go-nsq's log.
func (r *reader) Write(line []byte) (int, error) {
	if before, ok := strings.CutSuffix(strings.TrimSpace(string(line)), ") connecting to nsqd"); ok {
		address := before[strings.LastIndexByte(before, '(')+1:]
		r.mu.Lock()
		if r.dialled[address] == 0 {
			r.dialled[address] = time.Now().UnixNano()
		}
		r.mu.Unlock()
	}
	return len(line), nil
}

func (r *reader) Output(_ int, line string) error {
	_, err := r.Write([]byte(line))
	return err
}

func (r *reader) count(address string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if address != "" && r.first[address] == 0 {
		return 0
	}
	return len(r.got)
}

func (c *cluster) reader(topic, channel string) *reader {
	c.t.Helper()
	cfg := nsq.NewConfig()
	cfg.MaxInFlight, cfg.LookupdPollInterval, cfg.LookupdPollJitter = 200, 5*time.Minute, 0
	r := &reader{dialled: map[string]int64{}, first: map[string]int64{}, got: map[string]int{}}
	one := testkit.Result(nsq.NewConsumer(topic, channel, cfg)).Must(c.t)
	one.SetLogger(r, nsq.LogLevelInfo)
	one.AddHandler(r)
	testkit.Must(c.t, one.ConnectToNSQLookupd(c.web[0]))
	c.t.Cleanup(func() {
		one.Stop()
		<-one.StopChan
	})
	return r
}

// A broker is drained while stock consumers read from the broker. One of the consumers works as
// nsq_tail does. The consumers are connected to the new broker before the first message arrives there,
// and miss no message.
func TestConsumersAreThereBeforePublishers(t *testing.T) {
	const publishers = 4
	c := newCluster(t, 1, 1, "--consumer-wait=1m")
	c.create(contract("t", 10_000, 1000, publishers))
	readers := map[string]*reader{"all": c.reader("t", "all"), "tail": c.reader("t", "tail000001#ephemeral")}
	cl := newClient(t, c)
	defer func() { _ = cl.Close(context.Background()) }()
	var published atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var working sync.WaitGroup
	publish := func() {
		for i := range publishers {
			p := publisher(t, cl, "t", i)
			working.Go(func() {
				ticker := time.NewTicker(2 * time.Millisecond)
				defer ticker.Stop()
				for n := 0; ctx.Err() == nil; n++ {
					if err := p.Publish(t.Context(), fmt.Appendf(nil, "%d/%d", i, n)); err != nil {
						t.Error(err)
						return
					}
					published.Add(1)
					<-ticker.C
				}
			})
		}
	}
	// A channel gets the messages that are published after its creation.
	for name, r := range readers {
		testkit.WaitFor(t, name+" is connected", func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.dialled) == 1 })
	}
	testkit.WaitFor(t, "the channels are there", func() bool {
		var channels []string
		for _, b := range c.topic("t").GetStatus().GetBrokers() {
			channels = b.GetLast().GetChannels()
		}
		return len(channels) == 2
	})
	c.join(c.grpc...)
	c.connect(2)
	publish()
	for name, r := range readers {
		testkit.WaitFor(t, name+" reads", func() bool { return r.count("") > 100 })
	}
	testkit.Result(ask(c, srtmv1.AdminServiceClient.DrainBroker, &srtmv1.DrainBrokerRequest{BrokerId: "b1"})).Must(t)
	to := c.brokers[1].TCP
	for name, r := range readers {
		testkit.WaitFor(t, name+" reads from the new broker", func() bool { return r.count(to) > 0 })
	}
	testkit.WaitFor(t, "the old broker is safe to stop", func() bool {
		r, _ := ask(c, srtmv1.AdminServiceClient.ListBrokers, &srtmv1.ListBrokersRequest{})
		return slices.ContainsFunc(r.GetBrokers(), func(b *srtmv1.Broker) bool { return b.SafeToStop })
	})
	stop()
	working.Wait()
	for name, r := range readers {
		testkit.WaitFor(t, fmt.Sprintf("%s has all of %d", name, published.Load()), func() bool { return int64(r.count("")) == published.Load() })
		r.mu.Lock()
		if r.dialled[to] == 0 || r.dialled[to] > r.first[to] {
			t.Errorf("%s came to the new broker %v after the first message", name, time.Duration(r.dialled[to]-r.first[to]))
		}
		for body, n := range maps.All(r.got) {
			testkit.Equal(t, n, 1, "how often %s had %s", name, body)
		}
		if r.again > 0 {
			t.Errorf("%s had %d messages again", name, r.again)
		}
		r.mu.Unlock()
	}
}
