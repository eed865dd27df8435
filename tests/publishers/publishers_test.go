package publishers

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

const topic = "t"

// cluster is a loaddistributor and three brokers, with a topic whose publishers are p1 to p4.
type cluster struct {
	t *testing.T
	*localtest.Cluster
}

func start(t *testing.T) *cluster {
	t.Helper()
	// Two brokers carry the topic: 1,500 msg/s do not fit on one broker, and two brokers carry 2,000.
	return startSized(t, 1000, 1500)
}

// startSized starts brokers that carry mcap msg/s each, and creates a topic of rate msg/s.
func startSized(t *testing.T, mcap, rate int) *cluster {
	t.Helper()
	c := &cluster{t, localtest.Start(t, 3, []string{"--fitting=off"}, fmt.Sprintf("--mcap=%d", mcap))}
	args := []string{"topic", "create", topic, fmt.Sprintf("--rate=%d", rate), "--burst=1000", "--slo-latency=10s"}
	for _, id := range names {
		args = append(args, fmt.Sprintf("--publisher=%s::%d", id, rate/4))
	}
	localtest.Srtm(t, c.RPC, args...)
	return c
}

func (c *cluster) request(method, url, body string) (string, int) {
	c.t.Helper()
	text, status, err := localtest.Ask(method, url, body)
	testkit.Must(c.t, err)
	return text, status
}

// assignment is an answer of /publisher.
type assignment struct {
	BrokerID    string `json:"broker_id"`
	TCPAddress  string `json:"tcp_address"`
	HTTPAddress string `json:"http_address"`
	Epoch       uint64 `json:"epoch"`
}

func (c *cluster) where(id string) assignment {
	c.t.Helper()
	return testkit.Result(c.ask(id)).Must(c.t)
}

// ask is where for any goroutine.
func (c *cluster) ask(id string) (a assignment, err error) {
	text, status, err := localtest.Ask(http.MethodGet, "http://"+c.Web+"/publisher?topic="+topic+"&id="+id, "")
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("publisher %s: %d %s", id, status, text)
	}
	if err == nil {
		err = json.Unmarshal([]byte(text), &a)
	}
	return a, err
}

// read collects the messages of a stock consumer with the lookup.
func (c *cluster) read() localtest.Bodies {
	c.t.Helper()
	got := make(localtest.Bodies, 100_000)
	c.consume(got)
	return got
}

func (c *cluster) consume(handler nsq.Handler) {
	c.t.Helper()
	localtest.Consume(c.t, topic, "reader", handler, func(config *nsq.Config) {
		config.MaxInFlight, config.LookupdPollInterval, config.LookupdPollJitter = 1000, 100*time.Millisecond, 0
	}, "http://"+c.Web)
}

func TestAPublisherThatAsksOverHTTP(t *testing.T) {
	c := start(t)
	r := c.read()
	brokers := map[string]bool{}
	var sent []string
	for _, id := range names {
		a := c.where(id)
		i := slices.Index([]string{"b1", "b2", "b3"}, a.BrokerID)
		if i < 0 || a.TCPAddress != c.Brokers[i].TCP || a.HTTPAddress != c.Brokers[i].HTTP || a.Epoch == 0 {
			t.Fatalf("%s belongs to %+v", id, a)
		}
		brokers[a.BrokerID] = true
		testkit.Must(t, localtest.Producer(t, a.TCPAddress, id).Publish(topic, []byte(id)))
		sent = append(sent, id)
	}
	if len(brokers) != 2 {
		t.Errorf("the publishers are on %v, want two brokers", brokers)
	}
	r.Want(t, sent...)
	if text, status := c.request(http.MethodGet, "http://"+c.Web+"/publisher?topic="+topic+"&id=p5", ""); status != http.StatusNotFound || !strings.Contains(text, `"message":"PUBLISHER_NOT_FOUND"`) {
		t.Errorf("a publisher that is none: %d %s", status, text)
	}
}

func TestPublishingOverHTTP(t *testing.T) {
	c := start(t)
	r := c.read()
	carriers := map[string]bool{}
	for _, id := range names {
		carriers[c.where(id).HTTPAddress] = true
	}
	var sent []string
	for _, d := range c.Brokers {
		text, status := c.request(http.MethodPost, "http://"+d.HTTP+"/pub?topic="+topic, d.HTTP)
		if carriers[d.HTTP] {
			sent = append(sent, d.HTTP)
			if status != http.StatusOK || text != "OK" {
				t.Errorf("a broker of the topic: %d %s", status, text)
			}
		} else if status != http.StatusNotFound {
			t.Errorf("a broker that does not carry the topic: %d %s", status, text)
		}
	}
	if len(sent) != 2 {
		t.Errorf("%d brokers took it, want two", len(sent))
	}
	r.Want(t, sent...)
}

// agent runs `srtm agent`.
func (c *cluster) agent(flags ...string) *local.Process {
	c.t.Helper()
	free := localtest.Ports(c.t, 2)
	return c.agentAt(free[0], free[1], flags...)
}

func (c *cluster) agentAt(tcp, web string, flags ...string) *local.Process {
	c.t.Helper()
	flags = append([]string{"agent", "--tcp-address=" + tcp, "--http-address=" + web, "--loaddistributor-address=" + c.RPC}, flags...)
	d := localtest.Run(c.t, localtest.Program(c.t, "tools/srtm"), web+"/healthz", flags...)
	d.TCP, d.HTTP = tcp, web
	return d
}

func TestAStockProducerAndTheAgent(t *testing.T) {
	c := start(t)
	r := c.read()
	d := c.agent()
	var sent []string
	for _, id := range names {
		p := localtest.Producer(t, d.TCP, id)
		testkit.Must(t, p.Publish(topic, []byte(id+" one")))
		testkit.Must(t, p.MultiPublish(topic, [][]byte{[]byte(id + " two"), []byte(id + " three")}))
		testkit.Must(t, p.DeferredPublish(topic, 100*time.Millisecond, []byte(id+" four")))
		sent = append(sent, id+" one", id+" two", id+" three", id+" four")
	}
	r.Want(t, sent...)
	if text, _ := c.request(http.MethodGet, "http://"+d.HTTP+"/metrics", ""); !strings.Contains(text, `srtm_publish_agent_publishes_total{result="accepted"} 12`) {
		t.Error("the metrics do not have 12 accepted publishes")
	}
	for _, broker := range c.Brokers {
		clients, _ := c.request(http.MethodGet, "http://"+broker.HTTP+"/stats?format=json", "")
		for _, id := range names {
			here := c.where(id).TCPAddress == broker.TCP
			if strings.Contains(clients, `"client_id":"`+id+`"`) != here {
				t.Errorf("%s publishes at %s: %v", id, broker.TCP, !here)
			}
		}
	}
}

// Acknowledged messages survive the agent's end, however it ends.
func TestTheEndOfTheAgentUnderLoad(t *testing.T) {
	for name, end := range map[string]func(*local.Process) error{
		"killed":  (*local.Process).Kill,
		"stopped": (*local.Process).Stop,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := start(t)
			r := c.read()
			d := c.agent()
			var mu sync.Mutex
			var acknowledged []string
			enough := make(chan struct{}, 10_000)
			ctx, stop := context.WithCancel(context.Background())
			var sending sync.WaitGroup
			for _, id := range names {
				p := localtest.Producer(t, d.TCP, id)
				address := d.TCP
				sending.Go(func() {
					defer func() { p.Stop() }()
					for i := 0; ctx.Err() == nil; i++ {
						body := fmt.Sprintf("%s/%d", id, i)
						if p.Publish(topic, []byte(body)) != nil {
							retry(ctx, address)
							// A producer that reconnects has a data race in go-nsq.
							p.Stop()
							var err error
							if p, err = localtest.NewProducer(address, id); err != nil {
								t.Error(err)
								return
							}
							continue
						}
						mu.Lock()
						acknowledged = append(acknowledged, body)
						mu.Unlock()
						select {
						case enough <- struct{}{}:
						default:
						}
					}
				})
			}
			take := func(n int) {
				t.Helper()
				limit := time.NewTimer(local.Patience)
				defer limit.Stop()
				for range n {
					select {
					case <-enough:
					case <-limit.C:
						t.Fatal("nothing is acknowledged")
					}
				}
			}
			take(300)
			testkit.NoError(t, end(d))
			for len(enough) > 0 {
				<-enough
			}
			c.agentAt(d.TCP, d.HTTP)
			take(300)
			stop()
			sending.Wait()
			r.Want(t, acknowledged...)
		})
	}
}

// retry waits until a process listens at address.
func retry(ctx context.Context, address string) {
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for ctx.Err() == nil {
		if nc, err := net.Dial("tcp", address); err == nil {
			nc.Close()
			return
		}
		<-ticker.C
	}
}
