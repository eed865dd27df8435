package publishers

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nsqio/go-nsq"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// moves is the number of migrations in each test below.
const moves = 36

var names = []string{"p1", "p2", "p3", "p4"}

// receipt is the broker and the time of an acceptance.
type receipt struct {
	times    int
	accepted int64 // by the common clock of the brokers
}

// tally is the messages that stock consumers of all brokers have read, by body.
type tally struct {
	mu  sync.Mutex
	got map[string]receipt
}

func (y *tally) HandleMessage(m *nsq.Message) error {
	y.mu.Lock()
	defer y.mu.Unlock()
	r := y.got[string(m.Body)]
	if m.Attempts == 1 { // later attempts are redeliveries, not repeated publishes
		r.times++
	}
	r.accepted = m.Timestamp
	y.got[string(m.Body)] = r
	return nil
}

func (y *tally) has(bodies []string) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	return !slices.ContainsFunc(bodies, func(b string) bool { return y.got[b].times == 0 })
}

// tally reads the topic until the test ends.
func (c *cluster) tally() *tally {
	c.t.Helper()
	y := &tally{got: map[string]receipt{}}
	c.consume(y)
	return y
}

// source is the messages of a publisher.
type source struct {
	acknowledged []string        // in order; read when the publisher has ended
	doubtful     map[string]bool // messages without an answer
	count        atomic.Int64    // of acknowledged
	lost         int             // connections
}

// check waits for all acknowledged messages. It fails unless each publisher's messages were accepted
// in order, and only messages with a lost answer were accepted twice. It returns how many were
// accepted twice.
func (c *cluster) check(y *tally, sources map[string]*source) (twice int) {
	c.t.Helper()
	for id, s := range sources {
		testkit.WaitFor(c.t, fmt.Sprintf("%d messages of %s", len(s.acknowledged), id), func() bool { return y.has(s.acknowledged) })
	}
	y.mu.Lock()
	defer y.mu.Unlock()
	for id, s := range sources {
		last := int64(0)
		for _, body := range s.acknowledged {
			r := y.got[body]
			if r.times > 1 {
				if twice++; !s.doubtful[body] {
					c.t.Errorf("%s was accepted %d times, and answered the first time", body, r.times)
				}
			}
			if r.accepted < last {
				c.t.Errorf("%s of %s was accepted before the one before it", body, id)
			}
			last = r.accepted
		}
	}
	return twice
}

// shuffle moves publishers from broker to broker. Before each move all publishers have published again
// since the last move.
func (c *cluster) shuffle(sources map[string]*source) {
	c.t.Helper()
	admin := srtmv1.NewAdminServiceClient(localtest.Dial(c.t, c.RPC))
	rng := testkit.Rand(c.t)
	for range moves {
		for id, s := range sources {
			n := s.count.Load()
			testkit.WaitFor(c.t, "more of "+id, func() bool { return s.count.Load() >= n+5 })
		}
		to := fmt.Sprintf("b%d", 1+rng.IntN(3))
		ids := names[rng.IntN(2) : 2+rng.IntN(3)]
		ctx, cancel := context.WithTimeout(context.Background(), local.Patience)
		_, err := admin.MovePublishers(ctx, &srtmv1.MovePublishersRequest{Topic: topic, PublisherIds: ids, BrokerId: to})
		cancel()
		if err != nil {
			c.t.Fatalf("move %v to %s: %v", ids, to, err)
		}
	}
}

// A producer of a stock library follows the documentation: the producer requests its broker, and
// requests it again when a connection ends.
func TestStockProducersAreMoved(t *testing.T) {
	c := startSized(t, 20_000, 20_000)
	y := c.tally()
	sources := map[string]*source{}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var sending sync.WaitGroup
	for _, id := range names {
		s := &source{doubtful: map[string]bool{}}
		sources[id] = s
		sending.Go(func() {
			var p *nsq.Producer
			defer func() {
				if p != nil {
					p.Stop()
				}
			}()
			for n := 0; ctx.Err() == nil; {
				if p == nil {
					a, err := c.ask(id)
					if err == nil {
						p, err = localtest.NewProducer(a.TCPAddress, id)
					}
					if err != nil {
						if ctx.Err() == nil {
							t.Error(err)
						}
						return
					}
				}
				body := fmt.Sprintf("%s/%d", id, n)
				if p.Publish(topic, []byte(body)) != nil {
					// Without an answer, acceptance is unknown.
					s.doubtful[body] = true
					s.lost++
					p.Stop()
					p = nil
					continue
				}
				s.acknowledged = append(s.acknowledged, body)
				s.count.Add(1)
				n++
			}
		})
	}
	c.shuffle(sources)
	stop()
	sending.Wait()
	twice := c.check(y, sources)
	total, lost := 0, 0
	for _, s := range sources {
		total += len(s.acknowledged)
		lost += s.lost
	}
	t.Logf("%d messages, %d moves, %d connections ended, %d accepted twice", total, moves, lost, twice)
	// Not every move cuts a connection: while the old broker forwards for a publisher, the broker
	// assumes that the publisher follows. It disconnects the publisher a second later unless the
	// publisher has moved back.
	if lost == 0 {
		t.Errorf("no connection was ended by %d moves", moves)
	}
	// A drain is orderly: messages without an answer were not accepted.
	if twice > 0 {
		t.Errorf("%d messages were accepted twice", twice)
	}
}

// The same through the agent: the agent's producers notice nothing.
func TestTheAgentsProducersAreMoved(t *testing.T) {
	c := startSized(t, 20_000, 20_000)
	y := c.tally()
	d := c.agent()
	sources := map[string]*source{}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	dials := &dials{}
	var sending sync.WaitGroup
	for _, id := range names {
		s := &source{}
		sources[id] = s
		p := localtest.Producer(t, d.TCP, id)
		p.SetLogger(slog.NewLogLogger(slog.NewTextHandler(dials, nil), slog.LevelInfo), nsq.LogLevelInfo)
		sending.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				body := fmt.Sprintf("%s/%d", id, n)
				if err := p.Publish(topic, []byte(body)); err != nil {
					t.Errorf("%s: %v", body, err)
					return
				}
				s.acknowledged = append(s.acknowledged, body)
				s.count.Add(1)
			}
		})
	}
	c.shuffle(sources)
	stop()
	sending.Wait()
	testkit.Equal(t, dials.made.Load(), int64(len(names)), "connections of %d producers", len(names))
	if twice := c.check(y, sources); twice > 0 {
		t.Errorf("%d messages were accepted twice", twice)
	}
	agent, _ := c.request(http.MethodGet, "http://"+d.HTTP+"/metrics", "")
	for _, result := range []string{"refused", "unanswered", "unsent"} {
		if want := fmt.Sprintf("srtm_publish_agent_publishes_total{result=%q} 0\n", result); !strings.Contains(agent, want) {
			t.Errorf("the agent's metrics are without %s", want)
		}
	}
}

// dials counts the connections that go-nsq reports.
type dials struct{ made atomic.Int64 }

func (d *dials) Write(line []byte) (int, error) {
	if strings.Contains(string(line), "connecting to nsqd") {
		d.made.Add(1)
	}
	return len(line), nil
}

// HTTP publishers use any broker from lookup, including brokers that have just lost the topic's
// publishers, wherever the publishers are placed.
func TestPublishingOverHTTPWhilePublishersMove(t *testing.T) {
	c := startSized(t, 20_000, 20_000)
	y := c.tally()
	sources := map[string]*source{}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var sending sync.WaitGroup
	for _, d := range c.Brokers {
		s := &source{}
		sources[d.HTTP] = s
		sending.Go(func() {
			client := &http.Client{}
			defer client.CloseIdleConnections()
			for n := 0; ctx.Err() == nil; {
				body := fmt.Sprintf("%s/%d", d.HTTP, n)
				res, err := client.Post("http://"+d.HTTP+"/pub?topic="+topic, "text/plain", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				text, err := io.ReadAll(res.Body)
				res.Body.Close()
				switch {
				case err != nil:
					t.Error(err)
					return
				case res.StatusCode == http.StatusOK:
					s.acknowledged = append(s.acknowledged, body)
					n++
				case res.StatusCode != http.StatusNotFound || !strings.Contains(string(text), "TOPIC_NOT_FOUND"):
					t.Errorf("broker %s: %d %s", d.HTTP, res.StatusCode, text)
					return
				}
				s.count.Add(1) // any answer counts
			}
		})
	}
	c.shuffle(sources)
	stop()
	sending.Wait()
	if twice := c.check(y, sources); twice > 0 {
		t.Errorf("%d messages were accepted twice", twice)
	}
}
