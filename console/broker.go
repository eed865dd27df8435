package console

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/topics"
)

// Bounds of requests to brokers.
const (
	brokerTimeout = 3 * time.Second
	maxAnswer     = 8 << 20             // bytes
	maxElements   = bounded.MaxElements // of an answer's arrays, or of its metrics
	maxRemembered = 64                  // answers
	maxHeld       = 4 * maxAnswer
	maxShown      = 100     // clients of a broker on a page
	maxPeeked     = 4 << 10 // bytes of a message's body on a page
)

// answers holds the brokers' answers of the last second, so concurrent pages share one
// request.
type answers struct {
	asked singleflight.Group // by address and path
	mu    sync.Mutex
	known map[string]answer // guarded by mu; by address and path
}

type answer struct {
	at   time.Time
	body []byte
	err  error
}

// remembered returns a recent or pending answer to the same request, or sends the
// request.
func (c *Console) remembered(ctx context.Context, address, path string) ([]byte, error) {
	a, key := &c.answers, address+" "+path
	a.mu.Lock()
	known, ok := a.known[key]
	a.mu.Unlock()
	if ok && time.Since(known.at) < tick {
		return known.body, known.err
	}
	body, err, _ := a.asked.Do(key, func() (any, error) {
		body, err := c.ask(context.WithoutCancel(ctx), c.cfg.Brokers, http.MethodGet, address, path) // all waiting callers share the request
		a.keep(key, answer{time.Now(), body, err})
		return body, err
	})
	return body.([]byte), err
}

// keep stores an answer if there is room beside the answers of the last second.
func (a *answers) keep(key string, one answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	held := len(one.body)
	for key, other := range a.known {
		if one.at.Sub(other.at) >= tick {
			delete(a.known, key)
		} else {
			held += len(other.body)
		}
	}
	if a.known == nil {
		a.known = map[string]answer{}
	}
	if len(a.known) < maxRemembered && held <= maxHeld {
		a.known[key] = one
	}
}

// ask sends a request without a body to an HTTP API.
func (c *Console) ask(ctx context.Context, by http.RoundTripper, method, address, path string) ([]byte, error) {
	if by == nil {
		return nil, &problem{http.StatusNotImplemented, "This console does not ask brokers."}
	}
	client := &http.Client{Transport: by, Timeout: brokerTimeout, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	r, err := http.NewRequestWithContext(ctx, method, "http://"+address+path, nil)
	if err != nil {
		return nil, err
	}
	if shows := userOf(ctx).shows; shows != "" && c.cfg.Self != "" { // the broker that serves this console
		r.Header.Set("Authorization", shows)
	}
	res, err := client.Do(r)
	if err != nil {
		return nil, &problem{http.StatusBadGateway, fmt.Sprintf("%s does not answer: %v", address, err)}
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, &problem{http.StatusBadGateway, fmt.Sprintf("%s: %v", address, err)}
	case len(body) > maxAnswer:
		return nil, &problem{http.StatusBadGateway, fmt.Sprintf("%s answers with more than %d MiB.", address, maxAnswer>>20)}
	case res.StatusCode != http.StatusOK:
		return nil, &problem{http.StatusBadGateway, fmt.Sprintf("%s: %s: %.300s", address, res.Status, body)}
	}
	return body, nil
}

// brokerStats is the shown part of a broker's /stats.
type brokerStats struct {
	Health    string        `json:"health"`
	Topics    []brokerTopic `json:"topics"`
	Producers []client      `json:"producers"`
}

type brokerTopic struct {
	Name     string          `json:"topic_name"`
	Channels []brokerChannel `json:"channels"`
	Depth    int             `json:"depth"`
	Paused   bool            `json:"paused"`
	SRTM     struct {
		Limited bool    `json:"limited"`
		Expired uint64  `json:"expired"`
		Rate    float64 `json:"rate"`
		Burst   int64   `json:"burst"`
		Latency struct {
			Access   quantiles `json:"access_us"`
			Broker   quantiles `json:"processing_us"`
			Consumer quantiles `json:"consumer_us"`
		} `json:"latency"`
	} `json:"srtm"`
}

type quantiles struct {
	P99 int64 // µs
}

// Last returns the quantile at 0.99 as a duration.
func (q quantiles) Last() time.Duration { return time.Duration(q.P99) * time.Microsecond }

type brokerChannel struct {
	Name         string   `json:"channel_name"`
	Depth        int      `json:"depth"`
	BackendDepth int      `json:"backend_depth"`
	InFlight     int      `json:"in_flight_count"`
	Deferred     int      `json:"deferred_count"`
	Requeued     uint64   `json:"requeue_count"`
	TimedOut     uint64   `json:"timeout_count"`
	ClientCount  int      `json:"client_count"`
	Clients      []client `json:"clients"`
	Paused       bool     `json:"paused"`
	SRTM         struct {
		Expired      uint64 `json:"expired"`
		GivenUp      uint64 `json:"given_up"`
		DeadLettered uint64 `json:"dead_lettered"`
		Expiry       expiry `json:"expiry"`
	} `json:"srtm"`
}

// expiry is the expiry in force in a channel of a broker.
type expiry struct {
	TTL         float64 `json:"ttl_seconds"`
	MaxAttempts uint32  `json:"max_attempts"`
	DeadLetter  string  `json:"dead_letter"`
}

// Text describes the settings in one line; "" if messages stay until they are finished.
func (e expiry) Text() string {
	p := &srtmv1.Expiry{MaxAttempts: e.MaxAttempts, DeadLetterTopic: e.DeadLetter}
	if e.TTL > 0 && e.TTL < maxTTL {
		p.Ttl = durationpb.New(time.Duration(e.TTL * float64(time.Second)))
	}
	return topics.ExpiryText(p)
}

// maxTTL is the longest shown TTL, in seconds.
const maxTTL = 1e9

type client struct {
	ID        string `json:"client_id"`
	Remote    string `json:"remote_address"`
	UserAgent string `json:"user_agent"`
	Ready     int    `json:"ready_count"`
	InFlight  int    `json:"in_flight_count"`
	Messages  uint64 `json:"message_count"`
}

// stats requests a broker's stats of all topics, or of one topic or channel.
func (c *Console) stats(ctx context.Context, address, topic, channel string, clients bool) (s brokerStats, err error) {
	q := url.Values{"format": {"json"}, "include_mem": {"false"}, "include_clients": {strconv.FormatBool(clients)}}
	if topic != "" {
		q.Set("topic", topic)
	}
	if channel != "" {
		q.Set("channel", channel)
	}
	body, err := c.remembered(ctx, address, "/stats?"+q.Encode())
	if err == nil {
		err = decode(address, body, &s)
	}
	return s, err
}

// decode decodes a broker's answer into v. It refuses an answer that would take far more
// memory than its text.
func decode(address string, body []byte, v any) error {
	err := bounded.Decode(body, maxElements, v)
	switch {
	case errors.Is(err, bounded.ErrElements):
		return tooMany(address)
	case err != nil:
		return &problem{http.StatusBadGateway, fmt.Sprintf("%s: %v", address, err)}
	}
	return nil
}

func tooMany(address string) error {
	return &problem{http.StatusBadGateway, fmt.Sprintf("%s answers with more than %d entries.", address, maxElements)}
}

// shownMetrics are the metrics on a broker's page, with their titles. Values of topics
// are added up.
var shownMetrics = []struct{ name, text string }{
	{"srtm_nsqd_connections", "Connections of clients"},
	{"srtm_nsqd_loop_slow_turns_total", "Turns of event loops over 5 ms"},
	{"srtm_nsqd_disk_healthy", "Disk is well (1) or not (0)"},
	{"srtm_nsqd_topic_disk_bytes", "Bytes of messages on disk"},
	{"srtm_nsqd_topic_disk_needed_bytes", "Of them some channel needs"},
	{"srtm_nsqd_message_memory_bytes", "Bytes of messages in memory"},
	{"process_resident_memory_bytes", "Bytes of the process in memory"},
	{"process_cpu_seconds_total", "Seconds of processor time since its start"},
}

type metric struct {
	Text  string
	Value float64
}

// metrics returns the shown metrics from the broker's metrics text, and how long its
// event loops were busy.
func metrics(address string, text []byte) (all []metric, busy map[string]float64, err error) {
	var shown bytes.Buffer
	for line := range bytes.Lines(text) {
		name := bytes.TrimPrefix(line, []byte("# TYPE "))
		if end := bytes.IndexAny(name, "{ \t\n"); end >= 0 && isShown(string(name[:end])) {
			shown.Write(line)
		}
	}
	if bytes.Count(shown.Bytes(), []byte("\n"))+bytes.Count(shown.Bytes(), []byte(",")) > maxElements { // samples and their labels
		return nil, nil, tooMany(address)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, _ := parser.TextToMetricFamilies(&shown) // returns the families before a fault
	r := readingOf(slices.Collect(maps.Values(families)), time.Time{})
	for _, m := range shownMetrics {
		if v, there := r.sums[m.name]; there {
			all = append(all, metric{m.text, v})
		}
	}
	return all, r.busy, nil
}

func isShown(name string) bool {
	return name == busyMetric || slices.ContainsFunc(shownMetrics, func(m struct{ name, text string }) bool { return m.name == name })
}

type brokerData struct {
	ID      string
	Broker  *srtmv1.Broker // nil: a standalone broker
	Stats   brokerStats
	Metrics []metric
	Loops   []utilised // nil: not known yet
	Pager   pager      // of topics
	Trouble string
}

// address returns the HTTP address of a broker.
func (c *Console) address(id string) (string, *srtmv1.Broker, error) {
	if c.cfg.Self != "" {
		return c.cfg.Self, nil, nil
	}
	brokers := c.watched.cluster().Brokers
	i := slices.IndexFunc(brokers, func(b *srtmv1.Broker) bool { return b.Id == id })
	if i < 0 {
		return "", nil, &problem{http.StatusNotFound, fmt.Sprintf("There is no broker %s.", id)}
	}
	return brokers[i].HttpAddress, brokers[i], nil
}

// broker shows one broker.
func (c *Console) broker(ctx context.Context, q url.Values, _ user) (view, error) {
	d := brokerData{ID: q.Get("id")}
	address, known, err := c.address(d.ID)
	if err != nil {
		return view{}, err
	}
	d.Broker = known
	if d.Stats, err = c.stats(ctx, address, "", "", true); err != nil {
		d.Trouble = err.Error()
	}
	if text, err := c.remembered(ctx, address, "/metrics"); err == nil {
		var busy map[string]float64
		if d.Metrics, busy, err = metrics(address, text); err != nil {
			d.Trouble = err.Error()
		}
		d.Loops = c.loops.look(address, busy, time.Now())
	}
	path, charts := "/ui/broker", []string(nil)
	if c.cfg.Self != "" {
		path = "/ui/"
		c.watched.cluster() // a page shows the cluster
		if c.cfg.Own != nil {
			charts = []string{ownSeries}
		}
	}
	d.Stats.Topics, d.Pager = paged(d.Stats.Topics, path, q, "from")
	d.Stats.Producers = d.Stats.Producers[:min(len(d.Stats.Producers), maxShown)]
	return view{Template: "broker", Title: strings.TrimSpace("Broker " + d.ID), Topics: charts, Data: d}, nil
}

// holder is one broker's data of a channel.
type holder struct {
	Broker  string
	Trouble string // "": the broker answered
	brokerChannel
}

type channelData struct {
	Topic, Channel string
	Holders        []holder
	Paused         bool // on all answering brokers
	Depth          int
	InFlight       int
	Deferred       int
	Expiry         string // in force on the first answering broker
	Cluster        bool
}

// holders returns the brokers that have a topic, by id, with their addresses.
func (c *Console) holders(ctx context.Context, topic string) (map[string]string, error) {
	if c.cfg.Self != "" {
		return map[string]string{"": c.cfg.Self}, nil
	}
	limited, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	reply, err := c.admin.ListBrokers(limited, &srtmv1.ListBrokersRequest{})
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	for _, b := range reply.Brokers {
		if slices.Contains(b.Topics, topic) && b.Connected {
			found[b.Id] = b.HttpAddress
		}
	}
	if len(found) == 0 {
		return nil, &problem{http.StatusNotFound, fmt.Sprintf("No broker that is there has a topic %s.", topic)}
	}
	return found, nil
}

// maxAsked is the maximum number of concurrent requests to brokers.
const maxAsked = 16

// each asks all brokers concurrently, so stalled brokers together take only
// brokerTimeout. It returns the answers in the order of the brokers' ids.
func each[A any](found map[string]string, ask func(id, address string) A) []A {
	ids := sortedKeys(found)
	answers := make([]A, len(ids))
	var group errgroup.Group
	group.SetLimit(maxAsked)
	for i, id := range ids {
		group.Go(func() error {
			answers[i] = ask(id, found[id])
			return nil
		})
	}
	_ = group.Wait() // the group's functions return no errors
	return answers
}

// channel shows a channel on all brokers of its topic.
func (c *Console) channel(ctx context.Context, q url.Values, _ user) (view, error) {
	d := channelData{Topic: q.Get("topic"), Channel: q.Get("channel"), Cluster: c.cfg.API != nil}
	there, paused := 0, 0
	found, err := c.holders(ctx, d.Topic)
	if err != nil {
		return view{}, err
	}
	d.Holders = each(found, func(id, address string) holder {
		h := holder{Broker: id, Trouble: "it has no such channel"}
		s, err := c.stats(ctx, address, d.Topic, d.Channel, true)
		if err != nil {
			h.Trouble = err.Error()
		}
		for _, t := range s.Topics {
			for _, ch := range t.Channels {
				h.Trouble, h.brokerChannel = "", ch
				h.Clients = h.Clients[:min(len(h.Clients), maxShown)]
			}
		}
		return h
	})
	for _, h := range d.Holders {
		if h.Trouble != "" {
			continue
		}
		if there++; h.Paused {
			paused++
		}
		if there == 1 {
			d.Expiry = h.SRTM.Expiry.Text()
		}
		d.Depth += h.Depth + h.BackendDepth
		d.InFlight += h.InFlight
		d.Deferred += h.Deferred
	}
	d.Paused = there > 0 && paused == there
	return view{Template: "channel", Title: fmt.Sprintf("Channel %s of %s", d.Channel, d.Topic), Data: d}, nil
}

type peeked struct {
	Broker    string
	ID        string `json:"id"`
	Offset    uint64 `json:"offset"`
	Timestamp int64  `json:"timestamp"`
	Attempts  uint16 `json:"attempts"`
	Body      []byte `json:"body"`
}

// Text formats the body for people.
func (p peeked) Text() string {
	body, cut := p.Body, ""
	if len(body) > maxPeeked {
		body, cut = body[:maxPeeked], fmt.Sprintf("… (%d bytes in all)", len(p.Body))
		for len(body) > 0 && !utf8.Valid(body) && len(body) > maxPeeked-utf8.UTFMax {
			body = body[:len(body)-1]
		}
	}
	if !utf8.Valid(body) {
		return fmt.Sprintf("% x%s", body[:min(len(body), 512)], cut)
	}
	return string(body) + cut
}

// Published formats the time of publication, in UTC.
func (p peeked) Published() string {
	return time.Unix(0, p.Timestamp).UTC().Format("2006-01-02 15:04:05.000")
}

type peekData struct {
	Topic, Channel string
	Messages       []peeked
	Trouble        []string
}

// peek shows the next messages of a channel on each of its brokers.
func (c *Console) peek(ctx context.Context, q url.Values, u user) (view, error) {
	d := peekData{Topic: q.Get("topic"), Channel: q.Get("channel")}
	found, err := c.holders(ctx, d.Topic)
	if err != nil {
		return view{}, err
	}
	ask := url.Values{"topic": {d.Topic}, "channel": {d.Channel}, "count": {"5"}}
	type next struct {
		Messages []peeked `json:"messages"`
		err      error
	}
	for _, of := range each(found, func(id, address string) (r next) {
		var body []byte
		if body, r.err = c.ask(ctx, c.cfg.Brokers, http.MethodGet, address, "/channel/peek?"+ask.Encode()); r.err == nil {
			r.err = decode(address, body, &r)
		}
		for i := range r.Messages {
			r.Messages[i].Broker = id
		}
		return r
	}) {
		if of.err != nil {
			d.Trouble = append(d.Trouble, of.err.Error())
		}
		d.Messages = append(d.Messages, of.Messages...)
	}
	c.told("peek", u, nil, "topic", d.Topic, "channel", d.Channel)
	return view{Template: "peek", Title: fmt.Sprintf("Next of channel %s of %s", d.Channel, d.Topic), Data: d}, nil
}

// node is a node that nsqlookupd returns to consumers.
type node struct {
	Hostname   string   `json:"hostname"`
	Broadcast  string   `json:"broadcast_address"`
	HTTP       int      `json:"http_port"`
	Version    string   `json:"version"`
	Topics     []string `json:"topics"`
	Tombstones []bool   `json:"tombstones"`
}

// Name returns the node's name in tombstones.
func (n node) Name() string { return n.Broadcast + ":" + strconv.Itoa(n.HTTP) }

type nodesData struct {
	Nodes   []node
	Pager   pager
	Trouble string
}

// nodes shows the nodes that nsqlookupd returns to consumers.
func (c *Console) nodes(ctx context.Context, q url.Values, _ user) (view, error) {
	var d struct {
		Producers []node `json:"producers"`
	}
	body, err := c.ask(ctx, c.cfg.Lookup, http.MethodGet, "lookup", "/nodes")
	if err == nil {
		err = json.Unmarshal(body, &d)
	}
	var data nodesData
	data.Nodes, data.Pager = paged(d.Producers, "/ui/nodes", q, "from")
	if err != nil {
		data.Trouble = err.Error()
	}
	return view{Template: "nodes", Title: "Nodes", Data: data}, nil
}
