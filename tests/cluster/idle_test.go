package cluster

import (
	"net/http"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// The agent lets limited topics release for half a lease at a time. A topic without consumers, and with a
// share that needs no renewal, has no step but the next publish.
//
// The test waits in real time. A longer wait changes nothing. If the broker stalls during the test, the
// agent makes the topic release, and the test proves less.
func TestIdleTopicReleasesTheNextMessage(t *testing.T) {
	const lease = time.Second
	c := localtest.Start(t, 1, []string{"--flex-lease=" + lease.String()})
	<-time.After(lease) // the agent has a lease when the topic begins
	testkit.Result(localtest.CreateTopic(t.Context(), localtest.Dial(t, c.RPC), &srtmv1.CreateTopicRequest{Spec: &srtmv1.TopicSpec{
		Name: "t", Channels: []string{"c"}, ShareRule: "static", Groups: []*srtmv1.PublisherGroup{{Key: "a", Count: 1, Rate: 1}},
		Contract: &srtmv1.Contract{RateMilli: 1_000_000, Burst: 100, Slo: &srtmv1.Slo{Quantile: 0.99, Latency: durationpb.New(time.Second)}},
	}})).Must(t)
	for n := range 2 {
		<-time.After(lease)
		localtest.MustAsk(t, http.MethodPost, "http://"+c.Brokers[0].HTTP+"/pub?topic=t", "x")
		testkit.WaitFor(t, "release of the message", func() bool {
			released, err := localtest.Metric(c.Brokers[0], "srtm_nsqd_topic_messages_released_total")
			return err == nil && released == float64(n+1)
		})
	}
}
