package httpapi

import (
	"crypto/tls"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/nsqhttp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/stats"
)

// NSQ's fields come first in each type. "srtm" holds SRTM's own fields.

type infoJSON struct {
	Node
	StartTime              int64     `json:"start_time"`             // Unix seconds
	MaxHeartbeatInterval   int64     `json:"max_heartbeat_interval"` // ns, like max_output_buffer_timeout
	MaxOutputBufferSize    int       `json:"max_output_buffer_size"`
	MaxOutputBufferTimeout int64     `json:"max_output_buffer_timeout"`
	MaxDeflateLevel        int       `json:"max_deflate_level"`
	Stamps                 hook.Info `json:"arrival_stamps"`
}

func (a *API) info(w http.ResponseWriter, _ *http.Request) {
	n, s := a.cfg.Node, a.cfg.Session
	writeJSON(w, infoJSON{
		Node:                   n,
		StartTime:              n.StartTime.Unix(),
		MaxHeartbeatInterval:   s.MaxHeartbeatInterval.Nanoseconds(),
		MaxOutputBufferSize:    s.MaxOutputBufferSize,
		MaxOutputBufferTimeout: s.MaxOutputBufferTimeout.Nanoseconds(),
		MaxDeflateLevel:        s.MaxDeflateLevel,
		Stamps:                 a.stamps.Info(),
	})
}

type statsJSON struct {
	Version   string        `json:"version"`
	Health    string        `json:"health"`
	StartTime int64         `json:"start_time"` // Unix seconds
	Topics    []topicJSON   `json:"topics"`
	Memory    *stats.Memory `json:"memory,omitempty"`
	Producers []clientJSON  `json:"producers"` // null if there are none
}

type topicJSON struct {
	Name         string        `json:"topic_name"`
	Channels     []channelJSON `json:"channels"`
	Depth        int           `json:"depth"`
	BackendDepth int           `json:"backend_depth"`
	MessageCount uint64        `json:"message_count"`
	MessageBytes uint64        `json:"message_bytes"`
	Paused       bool          `json:"paused"`
	EndToEnd     endToEndJSON  `json:"e2e_processing_latency"`
	SRTM         limitJSON     `json:"srtm"`
	Pacing       pacingJSON    `json:"pacing"`
}

type channelJSON struct {
	Name         string       `json:"channel_name"`
	Depth        int          `json:"depth"`
	BackendDepth int          `json:"backend_depth"`
	InFlight     int          `json:"in_flight_count"`
	Deferred     int          `json:"deferred_count"`
	MessageCount uint64       `json:"message_count"`
	RequeueCount uint64       `json:"requeue_count"`
	TimeoutCount uint64       `json:"timeout_count"`
	ClientCount  int          `json:"client_count"`
	Clients      []clientJSON `json:"clients"` // null unless requested
	Paused       bool         `json:"paused"`
	EndToEnd     endToEndJSON `json:"e2e_processing_latency"`
	// First deliveries by the consumer's distance. Without topology awareness all count as global.
	ZoneLocal   uint64     `json:"zone_local_msg_count,omitempty"`
	RegionLocal uint64     `json:"region_local_msg_count,omitempty"`
	Global      uint64     `json:"global_msg_count,omitempty"`
	SRTM        cursorJSON `json:"srtm"`
}

func (c *channelJSON) setDeliveries(n queue.ChannelCounters, topologyAware bool) {
	if !topologyAware {
		c.Global = n.Delivered
		return
	}
	c.ZoneLocal, c.RegionLocal, c.Global = n.ByDistance[queue.Near], n.ByDistance[queue.Neighbour], n.ByDistance[queue.Far]
}

type cursorJSON struct {
	Unfinished int  `json:"unfinished"`  // messages from the oldest unfinished message to the cursor
	Full       bool `json:"cursor_full"` // Unfinished has reached --max-unfinished, so the channel gets no more messages

	Expiry       *expiryJSON `json:"expiry,omitempty"` // in force; absent if messages never expire
	Expired      uint64      `json:"expired"`          // messages
	GivenUp      uint64      `json:"given_up"`
	DeadLettered uint64      `json:"dead_lettered"`
}

type endToEndJSON struct {
	Count       int64            `json:"count"`
	Percentiles []percentileJSON `json:"percentiles"` // null unless configured
}

type percentileJSON struct {
	Quantile float64 `json:"quantile"`
	Nanos    int64   `json:"value"`
}

func endToEnd(s stats.Summary, percentiles []float64) endToEndJSON {
	j := endToEndJSON{Count: s.Count()}
	for _, q := range percentiles {
		j.Percentiles = append(j.Percentiles, percentileJSON{q, s.Quantile(q).Nanoseconds()})
	}
	return j
}

type clientJSON struct {
	ClientID      string         `json:"client_id"`
	Hostname      string         `json:"hostname"`
	Version       string         `json:"version"` // protocol: V2, mqtt3.1.1 or mqtt5
	RemoteAddress string         `json:"remote_address"`
	State         conn.State     `json:"state"`
	ReadyCount    int            `json:"ready_count"`
	InFlightCount int            `json:"in_flight_count"`
	MessageCount  uint64         `json:"message_count"`
	FinishCount   uint64         `json:"finish_count"`
	RequeueCount  uint64         `json:"requeue_count"`
	ConnectTime   int64          `json:"connect_ts"` // Unix seconds
	SampleRate    int            `json:"sample_rate"`
	Deflate       bool           `json:"deflate"`
	Snappy        bool           `json:"snappy"`
	UserAgent     string         `json:"user_agent"`
	Authed        bool           `json:"authed,omitempty"`
	AuthIdentity  string         `json:"auth_identity,omitempty"`
	AuthURL       string         `json:"auth_identity_url,omitempty"`
	PubCounts     []pubCountJSON `json:"pub_counts,omitempty"`
	Forwarder     string         `json:"forwarder,omitempty"` // id of the broker to which the client is connected; "": this broker
	Zone          string         `json:"topology_zone"`
	Region        string         `json:"topology_region"`

	TLS            bool   `json:"tls"`
	TLSCipherSuite string `json:"tls_cipher_suite"`
	TLSVersion     string `json:"tls_version"`
	TLSProtocol    string `json:"tls_negotiated_protocol"`
	TLSMutual      bool   `json:"tls_negotiated_protocol_is_mutual"`
}

type pubCountJSON struct {
	Topic string `json:"topic"`
	Count uint64 `json:"count"`
}

func clientOf(c conn.Info) clientJSON {
	j := clientJSON{
		ClientID:      c.ClientID,
		Hostname:      c.Hostname,
		Version:       c.Protocol,
		RemoteAddress: c.Remote,
		State:         c.State,
		ReadyCount:    c.Ready,
		InFlightCount: c.InFlight,
		MessageCount:  c.Messages,
		FinishCount:   c.Finished,
		RequeueCount:  c.Requeued,
		ConnectTime:   c.Connected.Unix(),
		SampleRate:    c.SampleRate,
		Deflate:       c.Deflate,
		Snappy:        c.Snappy,
		UserAgent:     c.UserAgent,
		Zone:          c.Zone,
		Region:        c.Region,
	}
	if g := c.Grant; g != nil {
		j.Authed, j.AuthIdentity, j.AuthURL = true, g.Identity, g.IdentityURL
	}
	if o := c.Origin; o != nil {
		j.Forwarder = o.Broker
		if o.Kind == "auth" {
			j.Authed, j.AuthIdentity = true, o.ID
		}
	}
	if s := c.TLS; s != nil {
		j.TLS = true
		j.TLSCipherSuite = tls.CipherSuiteName(s.CipherSuite)
		j.TLSVersion = tls.VersionName(s.Version)
		j.TLSProtocol = s.NegotiatedProtocol
		j.TLSMutual = true // since Go 1.16 an unknown protocol fails the handshake
	}
	for _, p := range c.Published {
		j.PubCounts = append(j.PubCounts, pubCountJSON{p.Topic, p.Count})
	}
	return j
}

type limitJSON struct {
	Limited   bool              `json:"limited"`
	Rate      float64           `json:"rate"`   // messages per second
	Burst     int64             `json:"burst"`  // messages
	Tokens    float64           `json:"tokens"` // may be negative
	Released  uint64            `json:"released"`
	Refused   uint64            `json:"refused"`
	Delivered uint64            `json:"delivered"`
	Exceeded  uint64            `json:"exceeded"` // above the SLO's latency
	SLO       sloJSON           `json:"slo"`
	Latency   latencyJSON       `json:"latency"`
	Stamps    map[string]uint64 `json:"stamps"` // messages by the source of their arrival time
	Publisher int               `json:"publishers"`
	Memory    int64             `json:"memory_bytes"` // of messages in memory
	Retain    string            `json:"retain"`       // in the format of --retain
	Expiry    *expiryJSON       `json:"expiry,omitempty"`
	Expired   uint64            `json:"expired"` // messages whose TTL passed before they got a token
}

type sloJSON struct {
	Quantile float64 `json:"quantile"`
	Micros   int64   `json:"latency_us"`
}

type latencyJSON struct {
	Access     quantilesJSON `json:"access_us"`
	Processing quantilesJSON `json:"processing_us"`
	Delivery   quantilesJSON `json:"delivery_us"`
	Consumer   quantilesJSON `json:"consumer_us"`
	// Delivery's histogram, if requested.
	Histogram *histogramJSON `json:"delivery_histogram,omitempty"`
}

// histogramJSON represents srtm.v1.Histogram.
type histogramJSON struct {
	Lowest  int64    `json:"lowest_us"`
	Highest int64    `json:"highest_us"`
	Digits  int32    `json:"significant_digits"`
	Index   []uint32 `json:"index"`
	Count   []uint64 `json:"count"`
}

func histogramOf(l *histogram.Latency) *histogramJSON {
	if l == nil {
		l = histogram.NewLatency()
	}
	p := obs.LatencyProto(l)
	return &histogramJSON{p.LowestUs, p.HighestUs, p.SignificantDigits, p.Index, p.Count}
}

type quantilesJSON struct {
	Count int64 `json:"count"`
	P50   int64 `json:"p50"`
	P99   int64 `json:"p99"`
	P999  int64 `json:"p999"`
}

func quantiles(l *histogram.Latency) quantilesJSON {
	if l == nil {
		return quantilesJSON{}
	}
	q := func(q float64) int64 { return l.Quantile(q).Microseconds() }
	return quantilesJSON{Count: l.Count(), P50: q(0.5), P99: q(0.99), P999: q(0.999)}
}

// topic returns a topic's stats, without the clients of its channels.
func (view *statistics) topic(s broker.Stats) topicJSON {
	t := topicJSON{
		Name:         s.Name,
		Channels:     make([]channelJSON, 0, len(s.Channels)),
		Depth:        s.Waiting,
		BackendDepth: s.Beyond,
		MessageCount: s.Counters.Accepted,
		MessageBytes: s.Counters.AcceptedBytes,
		Paused:       s.Paused,
		SRTM: limitJSON{
			Limited:   s.Limited,
			Rate:      s.Share.Rate.PerSecond(),
			Burst:     s.Share.Burst,
			Tokens:    float64(s.Tokens) / 1000,
			Released:  s.Counters.Released,
			Refused:   s.Counters.Refused,
			Delivered: s.Delivered,
			Exceeded:  s.Exceeded,
			SLO:       sloJSON{Quantile: s.SLO.Quantile, Micros: s.SLO.Latency.Microseconds()},
			Latency:   latencyJSON{Access: quantiles(s.Access), Processing: quantiles(s.Processing), Delivery: quantiles(s.Delivery), Consumer: quantiles(s.Consumer)},
			Stamps:    make(map[string]uint64, stamp.Sources),
			Publisher: s.Publishers,
			Memory:    s.Memory,
			Retain:    s.Retain.String(),
			Expiry:    expiryOf(s.Expiry),
			Expired:   s.Counters.Expired,
		},
	}
	for i, n := range s.Sources {
		t.SRTM.Stamps[stamp.Source(i).String()] = n
	}
	var all stats.Summary
	for _, c := range s.Channels {
		all.Merge(c.EndToEnd)
		t.Channels = append(t.Channels, channelJSON{
			Name: c.Name,
			// As in NSQ, depth excludes messages in flight and deferred messages.
			Depth:        c.Ready,
			BackendDepth: c.Beyond,
			InFlight:     c.InFlight,
			Deferred:     c.Deferred,
			MessageCount: c.Counters.Messages,
			RequeueCount: c.Counters.Requeued,
			TimeoutCount: c.Counters.TimedOut,
			ClientCount:  c.Consumers,
			Paused:       c.Paused,
			EndToEnd:     endToEnd(c.EndToEnd, view.cfg.Percentiles),
			SRTM: cursorJSON{
				Unfinished: c.Unfinished, Full: c.Full, Expiry: expiryOf(c.Expiry),
				Expired: c.Counters.Expired, GivenUp: c.Counters.GivenUp, DeadLettered: c.Counters.DeadLettered,
			},
		})
		t.Channels[len(t.Channels)-1].setDeliveries(c.Counters, view.cfg.TopologyAware)
	}
	t.EndToEnd = endToEnd(all, view.cfg.Percentiles)
	return t
}

// boolParam returns a boolean query parameter. The default is true.
func boolParam(r *http.Request, name string) bool {
	v, err := strconv.ParseBool(r.URL.Query().Get(name))
	return v || err != nil
}

// stats serves JSON with format=json, otherwise text. Query parameters filter by topic and channel,
// exclude clients and memory, and add histograms to JSON.
func (a *API) stats(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	s := a.statistics.gather(q.Get("topic"), q.Get("channel"), boolParam(r, "include_clients"), q.Get("include_histograms") == "true")
	if boolParam(r, "include_mem") {
		m := stats.ReadMemory()
		s.Memory = &m
	}
	if q.Get("format") == "json" {
		writeJSON(w, s)
		return
	}
	nsqhttp.WriteText(w, s.text(time.Now()))
}

// statistics reads the numbers of /stats from the broker and its connections.
type statistics struct {
	cfg    *Config
	broker *broker.Broker
	conns  *conn.Server
}

// gather collects the stats of a topic and a channel. "" selects all.
func (view *statistics) gather(topic, channel string, clients, histograms bool) statsJSON {
	s := statsJSON{
		Version:   view.cfg.Node.Version,
		Health:    view.health(),
		StartTime: view.cfg.Node.StartTime.Unix(),
		Topics:    []topicJSON{},
	}
	type key struct{ topic, channel string }
	consumers := make(map[key][]clientJSON)
	if clients {
		for _, c := range view.conns.Clients() {
			j := clientOf(c)
			if c.Channel != "" {
				k := key{c.Topic, c.Channel}
				consumers[k] = append(consumers[k], j)
			}
			if topic != "" {
				j.PubCounts = slices.DeleteFunc(j.PubCounts, func(p pubCountJSON) bool { return p.Topic != topic })
			}
			if len(j.PubCounts) > 0 {
				s.Producers = append(s.Producers, j)
			}
		}
	}
	for _, t := range view.broker.Topics() {
		if topic != "" && t.Name() != topic {
			continue
		}
		stats := t.Stats()
		j := view.topic(stats)
		j.Pacing = pacingOf(t.Paced(clients))
		if histograms {
			j.SRTM.Latency.Histogram = histogramOf(stats.Delivery)
		}
		if channel != "" {
			j.Channels = slices.DeleteFunc(j.Channels, func(c channelJSON) bool { return c.Name != channel })
		}
		for i := range j.Channels {
			c := &j.Channels[i]
			c.Clients = consumers[key{j.Name, c.Name}]
			if clients && c.Clients == nil {
				c.Clients = []clientJSON{}
			}
		}
		s.Topics = append(s.Topics, j)
	}
	return s
}

// health returns "OK", or "NOK - " and the reason.
func (view *statistics) health() string {
	if err := view.broker.Health(); err != nil {
		return "NOK - " + err.Error()
	}
	return "OK"
}

// ping returns 500 if the disk fails or is full. As in NSQ, nothing else makes the broker
// unhealthy.
func (a *API) ping(w http.ResponseWriter, _ *http.Request) {
	health := a.statistics.health()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if health != "OK" {
		w.WriteHeader(http.StatusInternalServerError)
	}
	_, _ = io.WriteString(w, health) // as in writeJSONBody
}

// state returns the content of /debug/state.
func (a *API) healthz() error {
	if err := a.broker.Health(); err != nil || a.cfg.Control == nil {
		return err
	}
	return a.cfg.Control()
}

func (a *API) state() any {
	s := map[string]any{
		"connections":    a.conns.Stats(),
		"arrival_stamps": a.stamps.Info(),
		"topics":         a.statistics.gather("", "", false, false).Topics,
	}
	if a.cfg.Lookupds != nil {
		s["nsqlookupd"] = a.cfg.Lookupds()
	}
	if a.cfg.Agent != nil {
		s["agent"] = a.cfg.Agent()
	}
	return s
}
