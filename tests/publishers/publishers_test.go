package publishers

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

const topic = "t"

// cluster is a loaddistributor and three brokers, with a topic whose publishers
// are p1 to p4.
type cluster struct {
	t *testing.T
	*localtest.Cluster
}

func start(t *testing.T) *cluster {
	t.Helper()
	// Two brokers carry it: 1,500 msg/s do not fit one, and 2,000 do two.
	return startSized(t, 1000, 1500)
}

// startSized starts brokers that carry mcap msg/s each, and a topic of so much.
func startSized(t *testing.T, mcap, rate int) *cluster {
	t.Helper()
	c := &cluster{t, localtest.Start(t, 3, []string{"--fitting=off"}, fmt.Sprintf("--mcap=%d", mcap))}
	args := []string{"topic", "create", topic, fmt.Sprintf("--rate=%d", rate), "--burst=1000", "--slo-latency=10s", "--loaddistributor-address=" + c.RPC}
	for _, id := range []string{"p1", "p2", "p3", "p4"} {
		args = append(args, fmt.Sprintf("--publisher=%s::%d", id, rate/4))
	}
	ctx, cancel := context.WithTimeout(context.Background(), local.Patience)
	defer cancel()
	if output, err := exec.CommandContext(ctx, localtest.Program(t, "tools/srtm"), args...).CombinedOutput(); err != nil {
		t.Fatalf("srtm topic create: %v\n%s", err, output)
	}
	return c
}

func (c *cluster) request(method, url, body string) (string, int) {
	c.t.Helper()
	text, status, err := localtest.Ask(method, url, body)
	if err != nil {
		c.t.Fatal(err)
	}
	return text, status
}

// assignment is what /publisher says.
type assignment struct {
	BrokerID    string `json:"broker_id"`
	TCPAddress  string `json:"tcp_address"`
	HTTPAddress string `json:"http_address"`
	Epoch       uint64 `json:"epoch"`
}

func (c *cluster) where(id string) assignment {
	c.t.Helper()
	a, err := c.ask(context.Background(), id)
	if err != nil {
		c.t.Fatal(err)
	}
	return a
}

// ask is where, for any goroutine.
func (c *cluster) ask(ctx context.Context, id string) (a assignment, err error) {
	ctx, cancel := context.WithTimeout(ctx, local.Patience)
	defer cancel()
	url := "http://" + c.Web + "/publisher?topic=" + topic + "&id=" + id
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return a, err
	}
	res, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		return a, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return a, fmt.Errorf("GET %s: %s", url, res.Status)
	}
	return a, json.NewDecoder(res.Body).Decode(&a)
}

// reader collects what a stock consumer reads, found through lookup.
type reader struct {
	t   *testing.T
	got chan string
}

func (c *cluster) read() *reader {
	c.t.Helper()
	config := nsq.NewConfig()
	config.MaxInFlight = 200
	config.LookupdPollInterval = 200 * time.Millisecond
	consumer, err := nsq.NewConsumer(topic, "reader", config)
	if err != nil {
		c.t.Fatal(err)
	}
	consumer.SetLogger(nil, nsq.LogLevelMax)
	r := &reader{t: c.t, got: make(chan string, 100_000)}
	consumer.AddHandler(nsq.HandlerFunc(func(m *nsq.Message) error {
		r.got <- string(m.Body)
		return nil
	}))
	if err := consumer.ConnectToNSQLookupd("http://" + c.Web); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		consumer.Stop()
		<-consumer.StopChan
	})
	return r
}

// want waits until everything wanted has come.
func (r *reader) want(want ...string) {
	r.t.Helper()
	missing := map[string]bool{}
	for _, body := range want {
		missing[body] = true
	}
	limit := time.NewTimer(local.Patience)
	defer limit.Stop()
	for len(missing) > 0 {
		select {
		case body := <-r.got:
			delete(missing, body)
		case <-limit.C:
			r.t.Fatalf("%d of %d messages have not come", len(missing), len(want))
		}
	}
}

func producer(t *testing.T, address, id string) *nsq.Producer {
	t.Helper()
	p, err := newProducer(address, id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	return p
}

func newProducer(address, id string) (*nsq.Producer, error) {
	config := nsq.NewConfig()
	config.ClientID = id
	p, err := nsq.NewProducer(address, config)
	if err == nil {
		p.SetLogger(nil, nsq.LogLevelMax)
	}
	return p, err
}

func TestAPublisherThatAsksOverHTTP(t *testing.T) {
	c := start(t)
	r := c.read()
	brokers := map[string]bool{}
	var sent []string
	for _, id := range []string{"p1", "p2", "p3", "p4"} {
		a := c.where(id)
		i := slices.Index([]string{"b1", "b2", "b3"}, a.BrokerID)
		if i < 0 || a.TCPAddress != c.Brokers[i].TCP || a.HTTPAddress != c.Brokers[i].HTTP || a.Epoch == 0 {
			t.Fatalf("%s belongs to %+v", id, a)
		}
		brokers[a.BrokerID] = true
		if err := producer(t, a.TCPAddress, id).Publish(topic, []byte(id)); err != nil {
			t.Fatal(err)
		}
		sent = append(sent, id)
	}
	if len(brokers) != 2 {
		t.Errorf("the publishers are on %v, want two brokers", brokers)
	}
	r.want(sent...)
	if text, status := c.request(http.MethodGet, "http://"+c.Web+"/publisher?topic="+topic+"&id=p5", ""); status != http.StatusNotFound || text != `{"message":"PUBLISHER_NOT_FOUND"}` {
		t.Errorf("a publisher that is none: %d %s", status, text)
	}
}

func TestPublishingOverHTTP(t *testing.T) {
	c := start(t)
	r := c.read()
	carriers := map[string]bool{c.where("p1").HTTPAddress: true, c.where("p2").HTTPAddress: true, c.where("p3").HTTPAddress: true, c.where("p4").HTTPAddress: true}
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
	r.want(sent...)
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
	for _, id := range []string{"p1", "p2", "p3", "p4"} {
		p := producer(t, d.TCP, id)
		if err := p.Publish(topic, []byte(id+" one")); err != nil {
			t.Fatal(err)
		}
		if err := p.MultiPublish(topic, [][]byte{[]byte(id + " two"), []byte(id + " three")}); err != nil {
			t.Fatal(err)
		}
		if err := p.DeferredPublish(topic, 100*time.Millisecond, []byte(id+" four")); err != nil {
			t.Fatal(err)
		}
		sent = append(sent, id+" one", id+" two", id+" three", id+" four")
	}
	r.want(sent...)
	if text, _ := c.request(http.MethodGet, "http://"+d.HTTP+"/metrics", ""); !strings.Contains(text, `srtm_publish_agent_publishes_total{result="accepted"} 12`) {
		t.Error("the metrics do not have 12 accepted publishes")
	}
	for _, broker := range c.Brokers {
		clients, _ := c.request(http.MethodGet, "http://"+broker.HTTP+"/stats?format=json", "")
		for _, id := range []string{"p1", "p2", "p3", "p4"} {
			here := c.where(id).TCPAddress == broker.TCP
			if strings.Contains(clients, `"client_id":"`+id+`"`) != here {
				t.Errorf("%s publishes at %s: %v", id, broker.TCP, !here)
			}
		}
	}
}

// What was acknowledged is there, whatever ends the agent.
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
			for _, id := range []string{"p1", "p2", "p3", "p4"} {
				p := producer(t, d.TCP, id)
				address := d.TCP
				sending.Go(func() {
					defer func() { p.Stop() }()
					for i := 0; ctx.Err() == nil; i++ {
						body := fmt.Sprintf("%s/%d", id, i)
						if p.Publish(topic, []byte(body)) != nil {
							retry(ctx, address)
							// One that connects again has a data race of its own.
							p.Stop()
							var err error
							if p, err = newProducer(address, id); err != nil {
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
			if err := end(d); err != nil {
				t.Error(err)
			}
			for len(enough) > 0 {
				<-enough
			}
			c.agentAt(d.TCP, d.HTTP)
			take(300)
			stop()
			sending.Wait()
			r.want(acknowledged...)
		})
	}
}

// retry waits until somebody listens at address.
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
