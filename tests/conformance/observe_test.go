package conformance

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestHTTP(t *testing.T) {
	group(t)
	check(t, "unknown path", func(t *testing.T) {
		r := common(t).get(t, "/nope")
		r.refused(t, 404, "NOT_FOUND")
		testkit.Equal(t, r.header.Get("X-NSQ-Content-Type"), "nsq; version=1.0", "X-NSQ-Content-Type")
	})
	check(t, "X-NSQ-Content-Type", func(t *testing.T) {
		n := common(t)
		for _, r := range []reply{n.get(t, "/stats?format=json"), n.get(t, "/info"), n.post(t, "/pub", ""), n.get(t, "/nope")} {
			testkit.Equal(t, r.header.Get("X-NSQ-Content-Type"), "nsq; version=1.0")
		}
	})
	check(t, "content types", func(t *testing.T) {
		n := common(t)
		for path, want := range map[string]string{
			"/stats?format=json": "application/json; charset=utf-8",
			"/stats":             "text/plain; charset=utf-8",
			"/info":              "application/json; charset=utf-8",
			"/ping":              "text/plain; charset=utf-8",
			"/nope":              "application/json; charset=utf-8",
		} {
			testkit.Equal(t, n.get(t, path).header.Get("Content-Type"), want, "%s", path)
		}
	})
	check(t, "kept connection", func(t *testing.T) {
		n := common(t)
		by := &http.Transport{}
		defer by.CloseIdleConnections()
		for range 10 {
			r, err := fetchBy(by, http.MethodPost, "http://"+n.http+"/pub?topic="+n.topic(), []byte("x"))
			if err != nil || r.status != http.StatusOK {
				t.Fatalf("got %+v, %v", r, err)
			}
		}
	})
	check(t, "info", func(t *testing.T) {
		n := common(t)
		o := n.get(t, "/info").object(t)
		has(t, o, "version", "broadcast_address", "hostname", "http_port", "tcp_port", "start_time")
		if n.process == nil {
			return
		}
		_, tcp, _ := net.SplitHostPort(n.tcp)
		_, web, _ := net.SplitHostPort(n.http)
		host := testkit.Result(os.Hostname()).Must(t)
		for key, want := range map[string]string{"tcp_port": tcp, "http_port": web} {
			if got, ok := o[key].(float64); !ok || strconv.Itoa(int(got)) != want {
				t.Errorf("%s: got %v, want %s", key, o[key], want)
			}
		}
		if o["broadcast_address"] != "127.0.0.1" || o["hostname"] != host {
			t.Errorf("got %v", o)
		}
		if at, ok := o["start_time"].(float64); !ok || time.Since(time.Unix(int64(at), 0)) > time.Hour {
			t.Errorf("start_time: got %v", o["start_time"])
		}
	})
	check(t, "info has the limits", func(t *testing.T) {
		o := common(t).get(t, "/info").object(t)
		for key, want := range map[string]float64{
			"max_heartbeat_interval": 60e9, "max_output_buffer_size": 65536, "max_output_buffer_timeout": 30e9, "max_deflate_level": 6,
		} {
			testkit.Equal[any](t, o[key], want, "%s", key)
		}
	})
	check(t, "broadcast flags", func(t *testing.T) {
		n := start(t, "--broadcast-address=broker.example", "--broadcast-tcp-port=1234", "--broadcast-http-port=1235")
		o := n.get(t, "/info").object(t)
		if o["broadcast_address"] != "broker.example" {
			t.Errorf("got %v", o)
		}
		// The ports are the listening ports. nsqlookupd uses the other ports.
		for key, address := range map[string]string{"tcp_port": n.tcp, "http_port": n.http} {
			if got, _ := o[key].(float64); !strings.HasSuffix(address, fmt.Sprintf(":%.0f", got)) {
				t.Errorf("%s is %v, and it listens at %s", key, o[key], address)
			}
		}
	})
	// Client libraries and tools decide by the version what the server can do: one library does not
	// use snappy with a version that begins with "0.".
	check(t, "version", func(t *testing.T) {
		n := common(t)
		for where, version := range map[string]any{
			"IDENTIFY": n.open(t).identify(nil)["version"],
			"/info":    n.get(t, "/info").object(t)["version"],
			"/stats":   n.get(t, "/stats?format=json").object(t)["version"],
		} {
			if v, _ := version.(string); !regexp.MustCompile(`^[1-9][0-9]*\.[0-9]+\.[0-9]+([-+][0-9A-Za-z.+-]+)?$`).MatchString(v) {
				t.Errorf("%s: %v is not a semantic version from 1.0.0 on", where, version)
			}
		}
	})
}

func TestStats(t *testing.T) {
	group(t)
	// busy returns a topic with a channel, a subscriber with a message, a waiting message, and a
	// connected publisher.
	busy := func(t *testing.T) (n *node, topic string) {
		n = common(t)
		topic = n.topic()
		c := n.open(t)
		c.identify(map[string]any{"client_id": "sub", "hostname": "sub.example", "user_agent": "probe/1.0", "output_buffer_timeout": 25})
		c.sub(topic, "ch").rdy(1)
		p := n.open(t)
		p.identify(map[string]any{"client_id": "pub", "hostname": "pub.example", "user_agent": "probe/2.0"})
		p.pub(topic, "first", "second", "third")
		c.fin(c.message().id)
		c.message()
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.InFlight == 1 && s.Depth == 1 })
		return n, topic
	}
	check(t, "JSON", func(t *testing.T) {
		n, topic := busy(t)
		o := n.get(t, "/stats?format=json&topic="+topic).object(t)
		has(t, o, "version", "health", "start_time", "topics")
		testkit.Equal(t, o["health"], "OK", "health")
		topics := o["topics"].([]any)
		testkit.MustEqual(t, len(topics), 1, "topics")
		first := topics[0].(map[string]any)
		has(t, first, "topic_name", "channels", "depth", "backend_depth", "message_count", "message_bytes", "paused")
		channel := first["channels"].([]any)[0].(map[string]any)
		has(t, channel, "channel_name", "depth", "backend_depth", "in_flight_count", "deferred_count", "message_count",
			"requeue_count", "timeout_count", "client_count", "clients", "paused")
		client := channel["clients"].([]any)[0].(map[string]any)
		has(t, client, "client_id", "hostname", "remote_address", "ready_count", "in_flight_count", "sample_rate", "user_agent")
	})
	check(t, "JSON of a client", func(t *testing.T) {
		n, topic := busy(t)
		c, _ := mustLookup(t, n, topic).channel("ch")
		got := c.Clients[0]
		age := time.Since(time.Unix(got.ConnectTS, 0))
		if age < -time.Second || age > patience+time.Minute {
			t.Errorf("connect_ts is %v ago", age)
		}
		got.ConnectTS, got.RemoteAddress = 0, ""
		want := clientStats{ClientID: "sub", Hostname: "sub.example", Version: "V2", State: 3, ReadyCount: 1, InFlightCount: 1,
			MessageCount: 2, FinishCount: 1, UserAgent: "probe/1.0"}
		if got != want {
			t.Errorf("got %+v\nwant %+v", got, want)
		}
	})
	check(t, "JSON of latencies", func(t *testing.T) {
		n, topic := busy(t)
		first := n.get(t, "/stats?format=json&topic="+topic).object(t)["topics"].([]any)[0].(map[string]any)
		has(t, first, "e2e_processing_latency")
		has(t, first["channels"].([]any)[0].(map[string]any), "e2e_processing_latency")
		latency, ok := first["e2e_processing_latency"].(map[string]any)
		if !ok {
			t.Fatalf("got %v", first["e2e_processing_latency"])
		}
		has(t, latency, "count", "percentiles")
	})
	check(t, "JSON of memory", func(t *testing.T) {
		n := common(t)
		o := n.get(t, "/stats?format=json").object(t)
		memory, ok := o["memory"].(map[string]any)
		if !ok {
			t.Fatalf("got %v", o["memory"])
		}
		has(t, memory, "heap_objects", "heap_idle_bytes", "heap_in_use_bytes", "heap_released_bytes",
			"gc_pause_usec_100", "gc_pause_usec_99", "gc_pause_usec_95", "next_gc_bytes", "gc_total_runs")
		if got, there := n.get(t, "/stats?format=json&include_mem=false").object(t)["memory"]; there {
			t.Errorf("include_mem=false: got %v", got)
		}
	})
	check(t, "JSON of producers", func(t *testing.T) {
		n, topic := busy(t)
		o := n.get(t, "/stats?format=json&topic="+topic).object(t)
		producers, ok := o["producers"].([]any)
		if !ok {
			t.Fatalf("got %v", o["producers"])
		}
		found := false
		for _, p := range producers {
			p := p.(map[string]any)
			if p["client_id"] != "pub" {
				continue
			}
			counts, _ := p["pub_counts"].([]any)
			for _, c := range counts {
				c := c.(map[string]any)
				found = found || c["topic"] == topic && c["count"] == 3.0
			}
		}
		if !found {
			t.Errorf("no producer has published 3 messages to %s: %v", topic, producers)
		}
	})
	check(t, "without clients", func(t *testing.T) {
		n, topic := busy(t)
		var s stats
		r := n.get(t, "/stats?format=json&include_clients=false&topic="+topic)
		testkit.Must(t, json.Unmarshal([]byte(r.body), &s))
		c, _ := s.Topics[0].channel("ch")
		if len(c.Clients) != 0 || c.ClientCount != 1 {
			t.Errorf("got %+v", c)
		}
		if producers := n.get(t, "/stats?format=json&include_clients=false").object(t)["producers"]; producers != nil {
			t.Errorf("producers: got %v", producers)
		}
	})
	check(t, "filter by channel", func(t *testing.T) {
		n, topic := busy(t)
		n.consumer(t, topic, "other")
		s := n.stats(t, "&topic="+topic+"&channel=other")
		if len(s.Topics) != 1 || len(s.Topics[0].Channels) != 1 || s.Topics[0].Channels[0].Name != "other" {
			t.Errorf("got %+v", s)
		}
	})
	check(t, "filter that finds nothing", func(t *testing.T) {
		n, topic := busy(t)
		if s := n.stats(t, "&topic="+topic+"x"); len(s.Topics) != 0 {
			t.Errorf("got %+v", s)
		}
		if s := n.stats(t, "&topic="+topic+"&channel=x"); len(s.Topics) > 1 || len(s.Topics) == 1 && len(s.Topics[0].Channels) > 0 {
			t.Errorf("got %+v", s)
		}
	})
	check(t, "topics by name", func(t *testing.T) {
		n := common(t)
		for range 5 {
			n.does(t, "/topic/create?topic="+n.topic())
		}
		last := ""
		for _, topic := range n.stats(t, "").Topics {
			if topic.Name <= last {
				t.Errorf("%q comes after %q", topic.Name, last)
			}
			last = topic.Name
		}
	})
	check(t, "text", func(t *testing.T) {
		n, topic := busy(t)
		for _, query := range []string{"", "?format=text", "?topic=" + topic, "?format=xml"} {
			r := n.get(t, "/stats"+query)
			testkit.MustEqual(t, r.status, http.StatusOK, "%q: %s", query, r.body)
			for _, want := range []string{
				`(?m)^start_time `,
				`(?mi)^ *health: OK$`,
				`(?m)^ *\[` + topic + ` *\] +depth: 0 +be-depth: 0 +msgs: 3 `,
				`(?m)^ *\[ch *\] +depth: 1 +be-depth: 0 +inflt: 1 +def: 0 +re-q: 0 +timeout: 0 +msgs: 3 `,
				`(?m)^ *\[V2 sub[^]]*\] +state: 3 +inflt: 1 +rdy: 1 +fin: 1 +re-q: 0 +msgs: 2 `,
			} {
				if !regexp.MustCompile(want).MatchString(r.body) {
					t.Errorf("/stats%s has no line %s:\n%.600s", query, want, r.body)
				}
			}
		}
	})
	check(t, "text of what is paused", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		n.does(t, "/topic/create?topic="+topic)
		n.does(t, "/channel/create?channel=ch&topic="+topic)
		n.does(t, "/channel/pause?channel=ch&topic="+topic)
		n.does(t, "/topic/pause?topic="+topic)
		r := n.get(t, "/stats?topic="+topic)
		if got := regexp.MustCompile(`(?m)\*P *( |$)`).FindAllString(r.body, -1); len(got) != 2 {
			t.Errorf("*P occurs %d times, want 2:\n%.600s", len(got), r.body)
		}
	})
}
