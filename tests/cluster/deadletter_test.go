package cluster

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// failing requeues every message at once.
type failing struct{}

func (failing) HandleMessage(m *nsq.Message) error {
	m.DisableAutoResponse()
	m.RequeueWithoutBackoff(0)
	return nil
}

// carrier returns the address of the broker that has a topic.
func carrier(t *testing.T, c *localtest.Cluster, topic string) string {
	t.Helper()
	address := ""
	testkit.WaitFor(t, "a broker with topic "+topic, func() bool {
		for _, b := range c.Brokers {
			text, _, err := localtest.Ask(http.MethodGet, "http://"+b.HTTP+"/stats?format=json&topic="+topic, "")
			if err == nil && strings.Contains(text, `"topic_name":"`+topic+`"`) {
				address = b.HTTP
			}
		}
		return address != ""
	})
	return address
}

// A message that fails reaches the dead letter topic on another broker; an update of the
// settings reaches the broker; and a message older than its TTL is gone.
func TestDeadLettersAndTTLInACluster(t *testing.T) {
	c := localtest.Start(t, 2, []string{"--fitting=off"}, "--mcap=1000")
	localtest.Srtm(t, c.RPC, "topic", "create", "orders.dead", "--rate=900", "--burst=100")
	localtest.Srtm(t, c.RPC, "topic", "create", "orders", "--rate=900", "--burst=100", "--channel=c", "--max-attempts=2", "--dead-letter=orders.dead")
	source, target := carrier(t, c, "orders"), carrier(t, c, "orders.dead")
	if source == target {
		t.Fatalf("both topics are on %s, want two brokers", source)
	}

	dead := make(localtest.Bodies, 10)
	localtest.Consume(t, "orders.dead", "d", dead, nil, "http://"+c.Web)
	stop := localtest.Consume(t, "orders", "c", failing{}, nil, "http://"+c.Web)
	localtest.MustAsk(t, http.MethodPost, "http://"+source+"/pub?topic=orders", "poison")
	var letter struct {
		Topic, Channel, Body string
		Attempts             int
	}
	text := <-dead
	testkit.Must(t, json.Unmarshal([]byte(text), &letter))
	if letter.Topic != "orders" || letter.Channel != "c" || letter.Attempts != 2 || letter.Body != "poison" {
		t.Errorf("got the dead letter %s", text)
	}
	stop()

	localtest.Srtm(t, c.RPC, "topic", "update", "orders", "--ttl=50ms", "--max-attempts=0", "--dead-letter=")
	has := func(want string) {
		t.Helper()
		testkit.WaitFor(t, want, func() bool {
			return strings.Contains(localtest.MustAsk(t, http.MethodGet, "http://"+source+"/stats?format=json&topic=orders", ""), want)
		})
	}
	has(`"expiry":{"ttl_seconds":0.05}`)
	localtest.MustAsk(t, http.MethodPost, "http://"+source+"/pub?topic=orders", "old")
	has(fmt.Sprintf(`"expired":%d`, 1))
	output, code := localtest.Command(t, localtest.Program(t, "tools/srtm"), "topic", "describe", "orders", "--loaddistributor-address="+c.RPC)
	if code != 0 || !strings.Contains(output, "discarded after 50ms") {
		t.Errorf("describe: exit code %d\n%s", code, output)
	}
	output, code = localtest.Command(t, localtest.Program(t, "tools/srtm"), "topic", "update", "orders", "--dead-letter=orders", "--max-attempts=1", "--loaddistributor-address="+c.RPC)
	if code == 0 || !strings.Contains(output, "the topic itself") {
		t.Errorf("a dead letter topic that is the topic itself: exit code %d\n%s", code, output)
	}
}
