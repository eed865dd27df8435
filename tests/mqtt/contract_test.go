package mqtt

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/eclipse/paho.golang/paho"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// MQTT and NSQ publishers of a topic on two brokers want more than the contract. Together they get the
// contract.
func TestContractHoldsForBothProtocols(t *testing.T) {
	const rate, burst, seconds, publishers = 600, 40, 5, 4
	traces := []string{filepath.Join(t.TempDir(), "releases"), filepath.Join(t.TempDir(), "releases")}
	ports := localtest.Ports(t, len(traces))
	c := localtest.Start(t, 0, nil)
	for i, port := range ports {
		c.Join(t, "--mcap=400", "--mqtt-address="+port, "--release-trace="+traces[i])
	}
	topic := testkit.Result(localtest.CreateTopic(t.Context(), localtest.Dial(t, c.RPC), &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
		Name:     "mixed",
		Contract: &srtmv1.Contract{RateMilli: rate * 1000, Burst: burst, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)}},
		Channels: []string{"archive"},
	}})).Must(t)
	testkit.MustEqual(t, len(topic.Quotas), len(traces))

	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var overMQTT, overNSQ atomic.Int64 // publishes that the brokers accepted
	for i, port := range ports {
		for n := range publishers {
			id := fmt.Sprintf("%d-%d", i, n)
			producer := localtest.Producer(t, c.Brokers[i].TCP, "nsq-"+id)
			wg.Go(func() {
				for ctx.Err() == nil {
					if producer.Publish("mixed", []byte("over NSQ")) == nil {
						overNSQ.Add(1)
					}
				}
			})
			wg.Go(func() {
				for ctx.Err() == nil { // the broker may send a publisher elsewhere
					overMQTT.Add(flood(ctx, port, "mqtt-"+id))
				}
			})
		}
	}
	var all []testkit.Release
	testkit.WaitFor(t, "releases", func() bool {
		all = nil
		for _, trace := range traces {
			all = append(all, testkit.ReadTrace(t, trace, "mixed")...)
		}
		return len(all) >= rate*seconds
	})
	cancel()
	wg.Wait()
	eligible, _ := testkit.Times(all)
	slack, err := testkit.Envelope(eligible, rate*1000, burst)
	testkit.NoError(t, err)
	first, last := eligible[0], eligible[0]
	for _, at := range eligible {
		first, last = min(first, at), max(last, at)
	}
	used := float64(len(all)) / (burst + rate*last.Sub(first).Seconds())
	t.Logf("%d messages in %v: slack %.2f messages, %.1f %% of the contract; accepted over MQTT %d, over NSQ %d", len(all), last.Sub(first), slack, 100*used, overMQTT.Load(), overNSQ.Load())
	if overMQTT.Load() == 0 || overNSQ.Load() == 0 {
		t.Errorf("accepted over MQTT %d, over NSQ %d", overMQTT.Load(), overNSQ.Load())
	}
}

// flood publishes until ctx or the connection ends, and returns how many publishes the broker accepted.
func flood(ctx context.Context, address, id string) (accepted int64) {
	nc, err := net.Dial("tcp", address)
	if err != nil {
		return 0
	}
	defer nc.Close()
	device := paho.NewClient(paho.ClientConfig{Conn: nc, PacketTimeout: testkit.Hang, OnClientError: func(error) {}})
	if _, err := device.Connect(ctx, &paho.Connect{ClientID: id, CleanStart: true, KeepAlive: 60}); err != nil {
		return 0
	}
	for {
		response, err := device.Publish(ctx, &paho.Publish{Topic: "mixed", QoS: 1, Payload: []byte("over MQTT")})
		switch {
		case err == nil:
			accepted++
		case response == nil:
			return accepted
		}
	}
}
