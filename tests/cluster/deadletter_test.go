package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/local"
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

// carrier returns the address of a topic's broker.
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

// A failing message reaches the dead letter topic on another broker, an update of the settings reaches
// the broker, and a message older than its TTL is removed.
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

// record requeues every message at once, and keeps the attempts of each delivery by body.
type record struct {
	mu  sync.Mutex
	all map[string][]uint16
}

func (r *record) HandleMessage(m *nsq.Message) error {
	r.mu.Lock()
	r.all[string(m.Body)] = append(r.all[string(m.Body)], m.Attempts)
	r.mu.Unlock()
	return failing{}.HandleMessage(m)
}

func (r *record) deliveries() map[string][]uint16 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.all)
}

// A topic moves between brokers while its messages are published and fail. Each message becomes a dead
// letter after two deliveries, on any broker. A channel without a consumer keeps its TTL through the
// moves: the channel becomes empty.
func TestDeadLettersAndTTLThroughMoves(t *testing.T) {
	const brokers, each, most = 3, 40, 2
	c := localtest.Start(t, brokers, []string{"--fitting=off", "--consumer-wait=10ms"}, "--mcap=5000")
	localtest.Srtm(t, c.RPC, "topic", "create", "orders.dead", "--rate=1000", "--burst=1000", "--channel=d")
	localtest.Srtm(t, c.RPC, "topic", "create", "orders", "--rate=1000", "--burst=1000", "--group=p:1:10", "--channel=c", "--channel=late",
		fmt.Sprint("--max-attempts=", most), "--dead-letter=orders.dead", "--channel-expiry=late:ttl=100ms")
	often := func(config *nsq.Config) { config.MaxInFlight, config.LookupdPollInterval = 100, 100*time.Millisecond }
	failed, dead := &record{all: map[string][]uint16{}}, make(localtest.Bodies, 10_000)
	localtest.Consume(t, "orders", "c", failed, often, "http://"+c.Web)
	localtest.Consume(t, "orders.dead", "d", dead, often, "http://"+c.Web)
	ctx, cancel := context.WithTimeout(t.Context(), 3*local.Patience)
	defer cancel()
	cl := testkit.Result(client.New(client.Config{Address: c.RPC})).Must(t)
	defer func() { testkit.NoError(t, cl.Close(ctx)) }()
	p := testkit.Result(cl.Publisher(ctx, "orders", "p.0")).Must(t)

	type own struct { // fields beyond NSQ's nsqd
		Expired int
		Expiry  struct {
			TTL         float64 `json:"ttl_seconds"`
			MaxAttempts int     `json:"max_attempts"`
			DeadLetter  string  `json:"dead_letter"`
		}
	}
	type stats struct {
		Topics []struct {
			SRTM     own
			Channels []struct {
				Name  string `json:"channel_name"`
				Depth int
				SRTM  own
			}
		}
	}
	// look checks the settings on every broker of the topic. look counts these brokers, and the
	// waiting and the expired messages of the channel late.
	look := func() (depth, expired, carriers int) {
		for _, b := range c.Brokers {
			var s stats
			testkit.Must(t, json.Unmarshal([]byte(localtest.MustAsk(t, http.MethodGet, "http://"+b.HTTP+"/stats?format=json&topic=orders", "")), &s))
			for _, topic := range s.Topics {
				carriers++
				if topic.SRTM.Expiry.MaxAttempts != most || topic.SRTM.Expiry.DeadLetter != "orders.dead" {
					t.Errorf("the broker at %s has the settings %+v", b.HTTP, topic.SRTM.Expiry)
				}
				for _, channel := range topic.Channels {
					if channel.Name != "late" {
						continue
					}
					if channel.SRTM.Expiry.TTL != 0.1 {
						t.Errorf("at the broker at %s the channel has a TTL of %v s", b.HTTP, channel.SRTM.Expiry.TTL)
					}
					depth, expired = depth+channel.Depth, expired+channel.SRTM.Expired
				}
			}
		}
		return depth, expired, carriers
	}

	want := map[string]bool{}
	for i := range 2 * brokers {
		var publishing sync.WaitGroup
		publishing.Go(func() {
			for n := range each {
				if err := p.Publish(ctx, fmt.Appendf(nil, "message %d of round %d", n, i)); err != nil {
					t.Errorf("message %d of round %d: %v", n, i, err)
				}
			}
		})
		output, code := localtest.Command(t, localtest.Program(t, "tools/srtm"), "topic", "move", "orders", fmt.Sprint("--to=b", i%brokers+1), "--all", "--loaddistributor-address="+c.RPC)
		publishing.Wait()
		if code != 0 {
			t.Fatalf("move %d: exit code %d\n%s", i, code, output)
		}
		look()
		for n := range each {
			want[fmt.Sprintf("message %d of round %d", n, i)] = true
		}
	}
	copies := map[string]int{}
	for len(copies) < len(want) {
		select {
		case text := <-dead:
			var letter struct {
				Topic, Channel, Body string
				Attempts             int
			}
			testkit.Must(t, json.Unmarshal([]byte(text), &letter))
			if !want[letter.Body] || letter.Topic != "orders" || letter.Channel != "c" || letter.Attempts != most {
				t.Errorf("got the dead letter %s", text)
			}
			copies[letter.Body]++
		case <-ctx.Done():
			t.Fatalf("%d of %d dead letters came", len(copies), len(want))
		}
	}
	for body, attempts := range failed.deliveries() {
		if slices.Max(attempts) > most || len(attempts) > most*copies[body] {
			t.Errorf("%s was delivered with attempts %d", body, attempts)
		}
	}
	// The topic's current broker may have had none of the messages.
	testkit.Must(t, p.Publish(ctx, []byte("the last one")))
	testkit.WaitFor(t, "the channel without a consumer is empty", func() bool {
		depth, expired, carriers := look()
		return depth == 0 && expired > 0 && carriers > 0
	})
}
