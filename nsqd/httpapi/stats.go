package httpapi

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// The first part of each shape is NSQ's; "srtm" holds what is ours.

type infoJSON struct {
	Node
	StartTime int64     `json:"start_time"` // Unix seconds
	Stamps    hook.Info `json:"arrival_stamps"`
}

func (a *API) info(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, infoJSON{Node: a.cfg.Node, StartTime: a.cfg.Node.StartTime.Unix(), Stamps: a.stamps.Info()})
}

type statsJSON struct {
	Version   string      `json:"version"`
	Health    string      `json:"health"`
	StartTime int64       `json:"start_time"`
	Topics    []topicJSON `json:"topics"`
}

type topicJSON struct {
	Name         string        `json:"topic_name"`
	Channels     []channelJSON `json:"channels"`
	Depth        int           `json:"depth"`
	BackendDepth int           `json:"backend_depth"`
	MessageCount uint64        `json:"message_count"`
	MessageBytes uint64        `json:"message_bytes"`
	Paused       bool          `json:"paused"`
	SRTM         limitJSON     `json:"srtm"`
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
	Clients      []clientJSON `json:"clients"`
	Paused       bool         `json:"paused"`
}

type clientJSON struct {
	ClientID      string `json:"client_id"`
	Hostname      string `json:"hostname"`
	RemoteAddress string `json:"remote_address"`
	UserAgent     string `json:"user_agent"`
	ReadyCount    int    `json:"ready_count"`
	InFlightCount int    `json:"in_flight_count"`
	SampleRate    int    `json:"sample_rate"`
}

type limitJSON struct {
	Limited   bool              `json:"limited"`
	Rate      float64           `json:"rate"`   // msg/s
	Burst     int64             `json:"burst"`  // msgs
	Tokens    float64           `json:"tokens"` // may be negative
	Released  uint64            `json:"released"`
	Refused   uint64            `json:"refused"`
	Delivered uint64            `json:"delivered"`
	Exceeded  uint64            `json:"exceeded"` // later than the SLO's latency
	SLO       sloJSON           `json:"slo"`
	Latency   latencyJSON       `json:"latency"`
	Stamps    map[string]uint64 `json:"stamps"` // messages by the source of their arrival time
	Publisher int               `json:"publishers"`
}

type sloJSON struct {
	Quantile float64 `json:"quantile"`
	Micros   int64   `json:"latency_us"`
}

type latencyJSON struct {
	Access     quantilesJSON `json:"access_us"`
	Processing quantilesJSON `json:"processing_us"`
	Delivery   quantilesJSON `json:"delivery_us"`
}

type quantilesJSON struct {
	Count int64 `json:"count"`
	P50   int64 `json:"p50"`
	P99   int64 `json:"p99"`
	P999  int64 `json:"p999"`
}

func quantiles(l *obs.Latency) quantilesJSON {
	if l == nil {
		return quantilesJSON{}
	}
	q := func(q float64) int64 { return l.Quantile(q).Microseconds() }
	return quantilesJSON{Count: l.Count(), P50: q(0.5), P99: q(0.99), P999: q(0.999)}
}

func topicStats(s broker.Stats) topicJSON {
	t := topicJSON{
		Name:         s.Name,
		Channels:     make([]channelJSON, 0, len(s.Channels)),
		Depth:        s.Waiting,
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
			Latency:   latencyJSON{quantiles(s.Access), quantiles(s.Processing), quantiles(s.Delivery)},
			Stamps:    make(map[string]uint64, stamp.Sources),
			Publisher: s.Publishers,
		},
	}
	for i, n := range s.Sources {
		t.SRTM.Stamps[stamp.Source(i).String()] = n
	}
	for _, c := range s.Channels {
		ch := channelJSON{
			Name: c.Name,
			// As in NSQ, what is in flight or deferred is not in the depth.
			Depth:        c.Ready,
			InFlight:     c.InFlight,
			Deferred:     c.Deferred,
			MessageCount: c.Counters.Messages,
			RequeueCount: c.Counters.Requeued,
			TimeoutCount: c.Counters.TimedOut,
			ClientCount:  len(c.Clients),
			Clients:      make([]clientJSON, 0, len(c.Clients)),
			Paused:       c.Paused,
		}
		for _, client := range c.Clients {
			ch.Clients = append(ch.Clients, clientJSON{
				ClientID:      client.ClientID,
				Hostname:      client.Hostname,
				RemoteAddress: client.Remote,
				UserAgent:     client.UserAgent,
				ReadyCount:    client.Ready,
				InFlightCount: client.InFlight,
				SampleRate:    client.SampleRate,
			})
		}
		t.Channels = append(t.Channels, ch)
	}
	return t
}

// stats serves format=json or text, filtered by topic and channel.
func (a *API) stats(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	topic, channel := q.Get("topic"), q.Get("channel")
	s := statsJSON{
		Version:   a.cfg.Node.Version,
		Health:    "OK",
		StartTime: a.cfg.Node.StartTime.Unix(),
		Topics:    []topicJSON{},
	}
	for _, t := range a.broker.Topics() {
		if topic != "" && t.Name() != topic {
			continue
		}
		stats := t.Stats()
		if channel != "" {
			kept := stats.Channels[:0]
			for _, c := range stats.Channels {
				if c.Name == channel {
					kept = append(kept, c)
				}
			}
			stats.Channels = kept
		}
		s.Topics = append(s.Topics, topicStats(stats))
	}
	switch format := q.Get("format"); format {
	case "json":
		writeJSON(w, s)
	case "", "text":
		writeText(w, s.text())
	default:
		writeFault(w, asFault(badRequest("INVALID_FORMAT", "format %q is neither json nor text", format)))
	}
}

func (s statsJSON) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\nstart_time %s\nhealth: %s\n", s.Version, time.Unix(s.StartTime, 0).Format(time.RFC3339), s.Health)
	if len(s.Topics) == 0 {
		b.WriteString("\nno topics\n")
	}
	for _, t := range s.Topics {
		fmt.Fprintf(&b, "\n[%s] depth: %d msgs: %d%s\n", t.Name, t.Depth, t.MessageCount, paused(t.Paused))
		if t.SRTM.Limited {
			fmt.Fprintf(&b, "  limit: %g msg/s burst: %d tokens: %.3f refused: %d\n", t.SRTM.Rate, t.SRTM.Burst, t.SRTM.Tokens, t.SRTM.Refused)
		}
		l := t.SRTM.Latency
		fmt.Fprintf(&b, "  p99 us: access %d processing %d delivery %d\n", l.Access.P99, l.Processing.P99, l.Delivery.P99)
		for _, c := range t.Channels {
			fmt.Fprintf(&b, "  [%s] depth: %d inflt: %d def: %d re-q: %d timeout: %d msgs: %d clients: %d%s\n",
				c.Name, c.Depth, c.InFlight, c.Deferred, c.RequeueCount, c.TimeoutCount, c.MessageCount, c.ClientCount, paused(c.Paused))
			for _, client := range c.Clients {
				fmt.Fprintf(&b, "    [%s %s] ready: %d inflt: %d\n", client.ClientID, client.RemoteAddress, client.ReadyCount, client.InFlightCount)
			}
		}
	}
	return b.String()
}

func paused(p bool) string {
	if p {
		return " *PAUSED*"
	}
	return ""
}

// state is /debug/state.
func (a *API) state() any {
	topics := []topicJSON{}
	for _, t := range a.broker.Topics() {
		topics = append(topics, topicStats(t.Stats()))
	}
	s := map[string]any{"connections": a.conns.Stats(), "arrival_stamps": a.stamps.Info(), "topics": topics}
	if a.cfg.Agent != nil {
		s["agent"] = a.cfg.Agent()
	}
	return s
}
