package httpapi_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
)

// serve opens the node for NSQ clients and returns its address.
func (n *node) serve() string {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ln := testkit.Result(n.conns.Listen(ctx, "127.0.0.1:0")).Must(n.t)
	served := make(chan error, 1)
	go func() { served <- n.conns.Serve(ctx, ln) }()
	n.t.Cleanup(func() {
		cancel()
		testkit.NoError(n.t, <-served)
		n.broker.Close()
		grace, cancel := context.WithTimeout(context.Background(), testkit.Hang)
		defer cancel()
		testkit.NoError(n.t, n.conns.Shutdown(grace))
	})
	return ln.Addr().String()
}

// peer is an NSQ client.
type peer struct {
	t  *testing.T
	nc net.Conn
	r  *bufio.Reader
}

func dial(t *testing.T, address string, in ...[]byte) *peer {
	t.Helper()
	nc := testkit.Result(net.Dial("tcp", address)).Must(t)
	t.Cleanup(func() { nc.Close() })
	testkit.Must(t, nc.SetDeadline(time.Now().Add(testkit.Hang)))
	p := &peer{t, nc, bufio.NewReader(nc)}
	p.send(append([][]byte{wire.AppendMagic(nil)}, in...)...)
	return p
}

func (p *peer) send(in ...[]byte) {
	p.t.Helper()
	testkit.Result(p.nc.Write(slices.Concat(in...))).Must(p.t)
}

func (p *peer) frame() []byte {
	p.t.Helper()
	_, data, err := frames.Read(p.r, 1<<20)
	testkit.Must(p.t, err)
	return data
}

func (p *peer) ok() {
	p.t.Helper()
	testkit.MustEqual(p.t, string(p.frame()), "OK")
}

func (p *peer) message() wire.Message {
	p.t.Helper()
	return testkit.Result(wire.ParseMessage(p.frame())).Must(p.t)
}

type object = map[string]any

func (n *node) json(path string) object {
	n.t.Helper()
	code, body := n.do("GET", path, "")
	var o object
	if err := json.Unmarshal([]byte(body), &o); err != nil || code != 200 {
		n.t.Fatalf("%s: %d %v in %s", path, code, err, body)
	}
	return o
}

func TestStatsOfClients(t *testing.T) {
	n := start(t, false)
	address := n.serve()
	sub := dial(t, address, wire.AppendIdentify(nil, []byte(`{"client_id":"sub","hostname":"sub.example","user_agent":"probe/1.0","topology_region":"r1","topology_zone":"z1"}`)))
	sub.ok()
	sub.send(wire.AppendSub(nil, "t", "c"), wire.AppendRdy(nil, 1))
	sub.ok()
	pub := dial(t, address)
	for range 3 {
		pub.send(wire.AppendPub(nil, "t", []byte("x")))
		pub.ok()
	}
	pub.send(wire.AppendMpub(nil, "u", [][]byte{[]byte("x"), []byte("y")}))
	pub.ok()
	sub.send(wire.AppendFin(nil, sub.message().ID))
	sub.send(fmt.Appendf(nil, "REQ %s 0\n", sub.message().ID))
	last := sub.message()
	leaving := dial(t, address, wire.AppendSub(nil, "t", "d"), []byte("CLS\n"))
	leaving.ok()
	testkit.MustEqual(t, string(leaving.frame()), "CLOSE_WAIT")
	host := "127.0.0.1"
	want := map[string]object{
		"sub": {"client_id": "sub", "hostname": "sub.example", "version": "V2", "state": 3., "ready_count": 1., "in_flight_count": 1.,
			"message_count": 3., "finish_count": 1., "requeue_count": 1., "sample_rate": 0., "deflate": false, "snappy": false, "user_agent": "probe/1.0", "topology_region": "r1", "topology_zone": "z1",
			"tls": false, "tls_cipher_suite": "", "tls_version": "", "tls_negotiated_protocol": "", "tls_negotiated_protocol_is_mutual": false},
		"leaving": {"client_id": host, "hostname": host, "version": "V2", "state": 4., "ready_count": 0., "in_flight_count": 0.,
			"message_count": 0., "finish_count": 0., "requeue_count": 0., "sample_rate": 0., "deflate": false, "snappy": false, "user_agent": "", "topology_region": "", "topology_zone": "",
			"tls": false, "tls_cipher_suite": "", "tls_version": "", "tls_negotiated_protocol": "", "tls_negotiated_protocol_is_mutual": false},
		"pub": {"client_id": host, "hostname": host, "version": "V2", "state": 0., "ready_count": 0., "in_flight_count": 0.,
			"message_count": 0., "finish_count": 0., "requeue_count": 0., "sample_rate": 0., "deflate": false, "snappy": false, "user_agent": "", "topology_region": "", "topology_zone": "",
			"pub_counts": []any{object{"topic": "t", "count": 3.}, object{"topic": "u", "count": 2.}},
			"tls":        false, "tls_cipher_suite": "", "tls_version": "", "tls_negotiated_protocol": "", "tls_negotiated_protocol_is_mutual": false},
	}
	compare := func(name string, got any, remote net.Conn) string {
		g, ok := got.(object)
		if !ok {
			return fmt.Sprintf("%s: %v", name, got)
		}
		if g["remote_address"] != remote.LocalAddr().String() {
			return fmt.Sprintf("%s: remote_address %v", name, g["remote_address"])
		}
		if at := g["connect_ts"].(float64); time.Since(time.Unix(int64(at), 0)) > time.Minute {
			return fmt.Sprintf("%s: connect_ts %v", name, at)
		}
		delete(g, "remote_address")
		delete(g, "connect_ts")
		if a, b := fmt.Sprint(g), fmt.Sprint(want[name]); a != b {
			return fmt.Sprintf("%s:\n%s, want\n%s", name, a, b)
		}
		return ""
	}
	testkit.WaitUntil(t, func() string {
		o := n.json("/stats?format=json&include_mem=false")
		topics := o["topics"].([]any)
		channels := topics[0].(object)["channels"].([]any)
		producers, _ := o["producers"].([]any)
		if len(producers) != 1 {
			return fmt.Sprintf("producers: %v", producers)
		}
		c := channels[0].(object)
		for _, o := range []object{topics[0].(object), c} { // one message was finished
			latency := o["e2e_processing_latency"].(object)
			percentiles := latency["percentiles"].([]any)
			first := percentiles[0].(object)
			if latency["count"] != 1. || len(percentiles) != 2 || first["quantile"] != 1. || first["value"].(float64) <= 0 {
				return fmt.Sprint(latency)
			}
		}
		if c["client_count"] != 1. || c["in_flight_count"] != 1. || c["depth"] != 1. || c["requeue_count"] != 1. || c["global_msg_count"] != 3. {
			return fmt.Sprint(c)
		}
		for _, problem := range []string{
			compare("sub", c["clients"].([]any)[0], sub.nc),
			compare("leaving", channels[1].(object)["clients"].([]any)[0], leaving.nc),
			compare("pub", producers[0], pub.nc),
		} {
			if problem != "" {
				return problem
			}
		}
		return ""
	})
	for path, want := range map[string]string{
		"/stats?format=json&include_clients=false":    "null [null null] null",
		"/stats?format=json&topic=u":                  "map[count:2 topic:u] [] x",
		"/stats?format=json&topic=t&channel=d":        "map[count:3 topic:t] [x] x",
		"/stats?format=json&topic=none":               "null none x",
		"/stats?format=json&include_clients=nonsense": "map[count:3 topic:t] [x x] x",
	} {
		o := n.json(path)
		first := "null"
		if producers, _ := o["producers"].([]any); producers != nil {
			first = fmt.Sprint(producers[0].(object)["pub_counts"].([]any)[0])
		}
		clients := "none"
		if topics := o["topics"].([]any); len(topics) > 0 {
			var all []string
			for _, c := range topics[0].(object)["channels"].([]any) {
				if c.(object)["clients"] == nil {
					all = append(all, "null")
				} else {
					all = append(all, "x")
				}
			}
			clients = fmt.Sprint(all)
		}
		memory := "x"
		if strings.Contains(path, "include_clients=false") {
			memory = "null"
		}
		testkit.Equal(t, fmt.Sprint(first, " ", clients, " ", memory), want, "%s", path)
	}
	sub.send(wire.AppendFin(nil, last.ID))
}

func TestStatsOfMemory(t *testing.T) {
	n := start(t, false)
	memory, ok := n.json("/stats?format=json")["memory"].(object)
	want := []string{"gc_pause_usec_100", "gc_pause_usec_95", "gc_pause_usec_99", "gc_total_runs", "heap_idle_bytes", "heap_in_use_bytes", "heap_objects", "heap_released_bytes", "next_gc_bytes"}
	if got := slices.Sorted(maps.Keys(memory)); !ok || !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
	if memory["heap_in_use_bytes"].(float64) <= 0 {
		t.Errorf("%v", memory)
	}
	if o := n.json("/stats?format=json&include_mem=false"); o["memory"] != nil {
		t.Errorf("%v", o["memory"])
	}
}

func TestInfo(t *testing.T) {
	o := start(t, false).json("/info")
	for key, want := range map[string]any{
		"version": "test", "release": "SRTM test", "broadcast_address": "b.example", "hostname": "h", "tcp_port": 4150., "http_port": 4151., "start_time": 1.,
		"max_heartbeat_interval": 60e9, "max_output_buffer_size": 65536., "max_output_buffer_timeout": 30e9, "max_deflate_level": 6., "broker_id": "b1",
	} {
		testkit.Equal(t, o[key], want, "%s", key)
	}
}

func TestStateHasNsqlookupd(t *testing.T) {
	start(t, false).expect("GET", "/debug/state", "", 200, `"address": "l:4160"`)
}

// A golden file holds the text of a node's stats; values that vary between runs are replaced.
func TestStatsText(t *testing.T) {
	n := start(t, false)
	address := n.serve()
	for _, path := range []string{"/topic/create?topic=idle", "/topic/create?topic=t", "/channel/create?topic=t&channel=paused", "/channel/pause?topic=t&channel=paused",
		"/topic/limit?topic=t&rate=1000000&burst=1000", "/topic/create?topic=stopped", "/topic/pause?topic=stopped"} {
		n.expect("POST", path, "", 200, "")
	}
	sub := dial(t, address, wire.AppendIdentify(nil, []byte(`{"client_id":"s\nu\u001bb"}`)))
	sub.ok()
	sub.send(wire.AppendSub(nil, "t", "c"), wire.AppendRdy(nil, 1))
	sub.ok()
	pub := dial(t, address, wire.AppendPub(nil, "t", []byte("x")), wire.AppendPub(nil, "t", []byte("x")), wire.AppendPub(nil, "idle", []byte("x")))
	for range 3 {
		pub.ok()
	}
	sub.message()
	var text string
	testkit.WaitUntil(t, func() string {
		_, text = n.do("GET", "/stats", "")
		if !strings.Contains(text, "delivery ") || !strings.Contains(text, "msgs: 1        connected") {
			return text
		}
		return ""
	})
	for pattern, with := range map[string]string{
		`(?m)^(   \S+ +\t)\d+$`: "${1}N",
		`uptime \S+`:            "uptime U",
		`built w/\S+\)`:         "built w/GO)",
		`:\d{4,5} *\]`:          ":PORT]",
		`connected: \d+s`:       "connected: Ns",
		`(access|processing|delivery|consumer) \d+`: "$1 N",
		`tokens: \S+`: "tokens: N",
	} {
		text = regexp.MustCompile(pattern).ReplaceAllString(text, with)
	}
	testkit.Golden(t, "testdata/stats.txt", []byte(text))
	_, brief := n.do("GET", "/stats?include_mem=false&include_clients=false&topic=idle", "")
	if strings.Contains(brief, "Memory") || strings.Contains(brief, "[V2 ") || strings.Contains(brief, "[t ") || !strings.Contains(brief, "[idle ") || !strings.Contains(brief, "Producers: None") {
		t.Errorf("%s", brief)
	}
	_, none := start(t, false).do("GET", "/stats?include_mem=false", "")
	if !strings.Contains(none, "\nTopics: None\n\nProducers: None\n") {
		t.Errorf("%s", none)
	}
}

// On request the stats include the histogram of delivery latencies: one count per delivery, in the form of the reports.
func TestStatsWithHistograms(t *testing.T) {
	n := start(t, false)
	n.do("POST", "/topic/create?topic=t", "")
	n.do("POST", "/channel/create?topic=t&channel=c", "")
	sub := dial(t, n.serve(), wire.AppendSub(nil, "t", "c"), wire.AppendRdy(nil, 10))
	sub.ok()
	for range 3 {
		n.do("POST", "/pub?topic=t", "body")
		sub.send(wire.AppendFin(nil, sub.message().ID))
	}
	latency := func(path string) object {
		return n.json(path)["topics"].([]any)[0].(object)["srtm"].(object)["latency"].(object)
	}
	testkit.WaitUntil(t, func() string {
		text, err := json.Marshal(latency("/stats?format=json&include_histograms=true")["delivery_histogram"])
		if err != nil {
			return err.Error()
		}
		var h srtmv1.Histogram
		if err := json.Unmarshal(text, &h); err != nil {
			return err.Error()
		}
		l, err := obs.LatencyFromProto(&h)
		if err != nil || l.Count() != 3 {
			return fmt.Sprintf("%s: %v", text, err)
		}
		return ""
	})
	if h, there := latency("/stats?format=json")["delivery_histogram"]; there {
		t.Errorf("not asked for: %v", h)
	}
}
