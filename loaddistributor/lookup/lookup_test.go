package lookup_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/lookup"
	"github.com/srtm-io/srtm/loaddistributor/registry"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// directory is a Directory in memory.
type directory struct {
	nodes    []controller.Node
	channels map[string][]string // by topic, including topics without a producer now
	cut      bool                // the store cannot be read
}

func (d directory) Nodes() []controller.Node     { return d.nodes }
func (d directory) Connected() []controller.Node { return d.nodes }

func (d directory) TopicNames() (names []string) {
	for _, n := range d.nodes {
		for _, topic := range n.Topics {
			if !strings.Contains(strings.Join(names, " "), topic) {
				names = append(names, topic)
			}
		}
	}
	return names
}

func (d directory) Producers(topic string) (nodes []controller.Node, channels []string, found bool) {
	for _, n := range d.nodes {
		for _, name := range n.Topics {
			if name == topic {
				nodes = append(nodes, n)
			}
		}
	}
	channels, exists := d.channels[topic]
	return nodes, channels, exists || len(nodes) > 0
}

func (d directory) Informed() (bool, <-chan struct{}) { return !d.cut, nil }

// While the store cannot be read, an unknown topic may exist. Consumers keep their connections on a
// 503, and end them on a 404.
func TestNoTopicIsDeniedWithoutTheStore(t *testing.T) {
	h := handler(directory{cut: true, nodes: []controller.Node{node("b1", "b1.example:4150", "b1.example:4151", "host1", "orders")}})
	for topic, want := range map[string]int{"orders": http.StatusOK, "clicks": http.StatusServiceUnavailable} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/lookup?topic="+topic, nil))
		testkit.Equal(t, w.Code, want, "%s: %s", topic, w.Body)
	}
}

func node(id, tcp, http, hostname string, topics ...string) controller.Node {
	return controller.Node{
		Broker: catalog.Broker{ID: id, TCPAddress: tcp, HTTPAddress: http, Hostname: hostname, Version: "0.1.0"},
		Remote: "10.0.0.1:52000", Topics: topics,
	}
}

func handler(d directory) http.Handler {
	mux := http.NewServeMux()
	lookup.Mount(mux, lookup.NewDirectory(d, registry.Config{}), "0.1.0", nil)
	return mux
}

// The answers for stock clients and tools, byte by byte.
func TestAnswers(t *testing.T) {
	h := handler(directory{
		nodes: []controller.Node{
			node("b1", "b1.example:4150", "b1.example:4151", "host1", "orders", "clicks"),
			node("b2", "[fe80::1]:5150", "[fe80::1]:5151", ""),
		},
		channels: map[string][]string{"orders": {"billing", "mail"}, "asleep": {}},
	})
	var all bytes.Buffer
	for _, target := range []string{
		"/ping", "/info", "/topics", "/nodes",
		"/channels?topic=orders", "/channels?topic=nobody", "/channels",
		"/lookup?topic=orders", "/lookup?topic=clicks", "/lookup?topic=asleep", "/lookup?topic=nobody", "/lookup", "/lookup?topic=" + strings.Repeat("x", 80),
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, target, nil))
		fmt.Fprintf(&all, "GET %s\n%d %s; %s\n", target, w.Code, w.Header().Get("Content-Type"), w.Header().Get("X-NSQ-Content-Type"))
		if strings.HasPrefix(w.Body.String(), "{") {
			testkit.Must(t, json.Indent(&all, w.Body.Bytes(), "", "  "))
		} else {
			all.Write(w.Body.Bytes())
		}
		all.WriteString("\n\n")
	}
	testkit.Golden(t, "testdata/answers.txt", all.Bytes())
}

// listless is a directory that fails the test on a listing of the whole cluster.
type listless struct {
	directory
	t *testing.T
}

func (l listless) Nodes() []controller.Node {
	l.t.Error("all topics of all brokers are listed")
	return nil
}

func (l listless) TopicNames() []string {
	l.t.Error("all topics are listed")
	return nil
}

// Each consumer looks its topic up some times a second. A lookup reads one topic only.
func TestALookupDoesNotListTheCluster(t *testing.T) {
	d := directory{nodes: []controller.Node{node("b1", "b1.example:4150", "b1.example:4151", "host1", "orders")}}
	mux := http.NewServeMux()
	lookup.Mount(mux, lookup.NewDirectory(listless{d, t}, registry.Config{}), "0.1.0", nil)
	for target, code := range map[string]int{
		"/lookup?topic=orders": 200, "/lookup?topic=nobody": 404, "/channels?topic=orders": 200, "/channels?topic=nobody": 200,
	} {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, target, nil))
		testkit.Equal(t, w.Code, code, "GET %s", target)
	}
}

// An unmodified consumer finds both brokers of its topic, and no others.
func TestAStockConsumerFindsTheBrokers(t *testing.T) {
	type dialled struct{ broker, hello string }
	arrived := make(chan dialled, 10)
	broker := func(id string) net.Listener {
		ln := testkit.Listen(t)
		go func() {
			for {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				hello := make([]byte, 4)
				if _, err := io.ReadFull(bufio.NewReader(conn), hello); err != nil {
					hello = []byte(err.Error())
				}
				arrived <- dialled{id, string(hello)}
				conn.Close() // the test needs no more of the connection
			}
		}()
		return ln
	}
	var d directory
	for _, id := range []string{"b1", "b2", "b3"} {
		topics := []string{"orders"}
		if id == "b3" {
			topics = []string{"clicks"}
		}
		d.nodes = append(d.nodes, node(id, broker(id).Addr().String(), "127.0.0.1:4151", "", topics...))
	}
	server := httptest.NewServer(handler(d))
	defer server.Close()

	cfg := nsq.NewConfig()
	cfg.DialTimeout = testkit.Hang
	consumer := testkit.Result(nsq.NewConsumer("orders", "test", cfg)).Must(t)
	consumer.SetLoggerLevel(nsq.LogLevelMax)
	consumer.AddHandler(nsq.HandlerFunc(func(*nsq.Message) error { return nil }))
	testkit.Must(t, consumer.ConnectToNSQLookupd(server.URL))
	found := map[string]string{}
	for range 2 {
		request := <-arrived
		found[request.broker] = request.hello
	}
	if found["b1"] != "  V2" || found["b2"] != "  V2" {
		t.Errorf("dialled %q, want b1 and b2 with the protocol's magic", found)
	}
	consumer.Stop()
	<-consumer.StopChan
}
