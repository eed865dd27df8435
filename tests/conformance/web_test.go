package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// reply is an HTTP response.
type reply struct {
	status int
	header http.Header
	body   string
}

// transport keeps no connections, because a kept connection outlives its nsqd.
var transport = &http.Transport{DisableKeepAlives: true}

func fetch(method, url string, body []byte) (reply, error) {
	return fetchBy(transport, method, url, body)
}

func fetchBy(by http.RoundTripper, method, url string, body []byte) (reply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	res, err := by.RoundTrip(req) // a redirect counts as an answer
	if err != nil {
		return reply{}, err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return reply{res.StatusCode, res.Header, string(text)}, err
}

func (n *node) web(t *testing.T, method, path, body string) reply {
	t.Helper()
	r, err := fetch(method, "http://"+n.http+path, []byte(body))
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return r
}

func (n *node) get(t *testing.T, path string) reply {
	t.Helper()
	return n.web(t, http.MethodGet, path, "")
}

func (n *node) post(t *testing.T, path, body string) reply {
	t.Helper()
	return n.web(t, http.MethodPost, path, body)
}

// does checks that a POST succeeds.
func (n *node) does(t *testing.T, path string) {
	t.Helper()
	if r := n.post(t, path, ""); r.status != http.StatusOK {
		t.Fatalf("POST %s: %d %s", path, r.status, r.body)
	}
}

// refused checks that an answer is an error with this status and message.
func (r reply) refused(t *testing.T, status int, code string) {
	t.Helper()
	var e struct{ Message string }
	if err := json.Unmarshal([]byte(r.body), &e); err != nil {
		t.Fatalf("%d %.200q is not JSON with a message: %v", r.status, r.body, err)
	}
	if r.status != status || e.Message != code {
		t.Fatalf("got %d %s, want %d %s", r.status, e.Message, status, code)
	}
}

// object decodes an answer that must be a JSON object.
func (r reply) object(t *testing.T) map[string]any {
	t.Helper()
	testkit.MustEqual(t, r.status, http.StatusOK, "%.200q", r.body)
	var o map[string]any
	if err := json.Unmarshal([]byte(r.body), &o); err != nil {
		t.Fatalf("%.200q is not a JSON object: %v", r.body, err)
	}
	return o
}

// has checks that o has these keys.
func has(t *testing.T, o map[string]any, keys ...string) {
	t.Helper()
	for _, k := range keys {
		if _, ok := o[k]; !ok {
			t.Errorf("no key %q in %v", k, o)
		}
	}
}

// The members of /stats?format=json that cases wait for.
type stats struct {
	Version   string
	Health    string
	StartTime int64 `json:"start_time"`
	Topics    []topicStats
}

type topicStats struct {
	Name         string `json:"topic_name"`
	Channels     []channelStats
	Depth        int
	BackendDepth int `json:"backend_depth"`
	MessageCount int `json:"message_count"`
	MessageBytes int `json:"message_bytes"`
	Paused       bool
}

type channelStats struct {
	Name         string `json:"channel_name"`
	Depth        int
	BackendDepth int `json:"backend_depth"`
	InFlight     int `json:"in_flight_count"`
	Deferred     int `json:"deferred_count"`
	MessageCount int `json:"message_count"`
	RequeueCount int `json:"requeue_count"`
	TimeoutCount int `json:"timeout_count"`
	ClientCount  int `json:"client_count"`
	Clients      []clientStats
	Paused       bool
}

type clientStats struct {
	ClientID      string `json:"client_id"`
	Hostname      string
	Version       string
	RemoteAddress string `json:"remote_address"`
	State         int
	ReadyCount    int   `json:"ready_count"`
	InFlightCount int   `json:"in_flight_count"`
	MessageCount  int   `json:"message_count"`
	FinishCount   int   `json:"finish_count"`
	RequeueCount  int   `json:"requeue_count"`
	ConnectTS     int64 `json:"connect_ts"`
	SampleRate    int   `json:"sample_rate"`
	Deflate       bool
	Snappy        bool
	UserAgent     string `json:"user_agent"`
	TLS           bool
}

func (n *node) stats(t *testing.T, query string) stats {
	t.Helper()
	r := n.get(t, "/stats?format=json"+query)
	var s stats
	if err := json.Unmarshal([]byte(r.body), &s); err != nil || r.status != http.StatusOK {
		t.Fatalf("/stats: %d %.200q: %v", r.status, r.body, err)
	}
	return s
}

// lookup returns a topic's stats, and whether the topic exists.
func (n *node) lookup(t *testing.T, topic string) (topicStats, bool) {
	t.Helper()
	all := n.stats(t, "&topic="+strings.ReplaceAll(topic, "#", "%23")).Topics
	i := slices.IndexFunc(all, func(s topicStats) bool { return s.Name == topic })
	if i < 0 {
		return topicStats{}, false
	}
	return all[i], true
}

// channel returns the stats of a channel of the topic, and whether the channel exists.
func (s topicStats) channel(name string) (channelStats, bool) {
	i := slices.IndexFunc(s.Channels, func(c channelStats) bool { return c.Name == name })
	if i < 0 {
		return channelStats{}, false
	}
	return s.Channels[i], true
}

// settle waits until right accepts a channel's stats.
func (n *node) settle(t *testing.T, topic, channel string, right func(channelStats) bool) {
	t.Helper()
	testkit.WaitUntil(t, func() string {
		s, _ := n.lookup(t, topic)
		c, exists := s.channel(channel)
		if exists && right(c) {
			return ""
		}
		return fmt.Sprintf("%s/%s: topic depth %d, channel %+v (exists: %t)", topic, channel, s.Depth, c, exists)
	})
}

// depth waits until a channel has want waiting messages.
func (n *node) depth(t *testing.T, topic, channel string, want int) {
	t.Helper()
	n.settle(t, topic, channel, func(c channelStats) bool { return c.Depth == want })
}

// mustLookup returns the stats of a topic that must exist.
func mustLookup(t *testing.T, n *node, topic string) topicStats {
	t.Helper()
	s, exists := n.lookup(t, topic)
	if !exists {
		t.Fatalf("no topic %s", topic)
	}
	return s
}
