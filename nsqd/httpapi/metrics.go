package httpapi

import (
	"math"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/nsqhttp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/lookupd"
)

// collector turns the broker's stats into metrics at each scrape. Labels are topics and channels,
// never clients.
type collector struct {
	cfg     *Config
	broker  *broker.Broker
	conns   *conn.Server
	stamps  *hook.Stamper
	bodies  *nsqhttp.Bodies
	answers *answers
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("srtm_nsqd_"+name, help, labels, nil)
}

// metric describes a metric and how to compute its value from an S.
type metric[S any] struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(S) float64
}

type number interface {
	~int | ~int64 | ~uint64 | ~float64
}

func gauge[S any, N number](d *prometheus.Desc, value func(S) N) metric[S] {
	return metric[S]{d, prometheus.GaugeValue, func(s S) float64 { return float64(value(s)) }}
}

func counter[S any, N number](d *prometheus.Desc, value func(S) N) metric[S] {
	return metric[S]{d, prometheus.CounterValue, func(s S) float64 { return float64(value(s)) }}
}

func collect[S any](out chan<- prometheus.Metric, all []metric[S], source S, labels ...string) {
	for _, m := range all {
		out <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(source), labels...)
	}
}

func oneIf(condition bool) float64 {
	if condition {
		return 1
	}
	return 0
}

var (
	descWeb        = desc("http_connections", "Open connections for HTTP.")
	descWebRefused = desc("http_connections_refused_total", "Connections for HTTP refused at --max-http-connections.")
	descAnswers    = desc("http_answers_refused_total", "Requests for stats, state, metrics and messages refused: the answers that are not read yet take as much memory as they may.")
	descBodies     = desc("http_bodies_refused_total", "Requests refused: the bodies of all take as much memory as they may.")
	descNames      = desc("names_refused_total", "Topics and channels not created because of a limit.", "kind")
	descSlowTurns  = desc("loop_slow_turns_total", "Parts of event loops' turns that took longer than 5 ms: commands, output, timers.", "cause")
	descAuth       = desc("auth_requests_total", "Questions to auth servers, by how they ended.", "result")
	descStamps     = desc("arrivals_total", "Publishes, over TCP and HTTP, by the source of their arrival time; a batch counts once.", "source")
	descMemory     = desc("message_memory_bytes", "Bytes that messages take in memory.")
	descMemoryMost = desc("message_memory_limit_bytes", "Bytes that messages may take in memory; absent without a limit.")
	descDisk       = desc("disk_healthy", "1 while the disk does what it should, 0 while it is full or fails.")
	descUnreadable = desc("disk_unreadable_messages", "Messages on disk that cannot be read, at least: where their number is not known, each place with damage counts as one. Their files are kept.")
	descDiskFaults = desc("topic_disk_faults_total", "Faults of the files of messages on disk, by kind: no_space, error, torn, quarantined, missing.", "topic", "kind")
	descLatency    = desc("topic_latency_seconds", "Latency of first deliveries, by part: access (waiting for tokens), processing (the broker), delivery (both: what the SLO is about), and consumer (waiting for one with credit).", "topic", "part")
	descNoSeries   = desc("names_without_series", "Topics, and channels of other topics, beyond the bound on metrics of their own.", "kind")
)

var connMetrics = []metric[conn.Stats]{
	gauge(desc("connections", "Open client connections."), func(s conn.Stats) int { return s.Connections }),
	counter(desc("connections_accepted_total", "Client connections accepted."), func(s conn.Stats) uint64 { return s.Accepted }),
	counter(desc("connections_refused_total", "Client connections refused: over the limit, or accept failed."), func(s conn.Stats) uint64 { return s.Refused }),
	counter(desc("connections_evicted_total", "Client connections closed for others, over the limit: what is required of all, TLS or AUTH, had not come yet."), func(s conn.Stats) uint64 { return s.Evicted }),
	counter(desc("connections_faulted_total", "Client connections closed for a fatal protocol error."), func(s conn.Stats) uint64 { return s.Faults }),
	counter(desc("connections_bodies_refused_total", "Client connections closed because incomplete commands used all the memory for them."), func(s conn.Stats) uint64 { return s.MemoryShort }),
}

var loopMetrics = []metric[conn.LoopStats]{
	counter(desc("loop_busy_seconds_total", "Processor time that an event loop took; its rate is the loop's utilisation, 1: saturated. The number of loops may follow the load (--io-loops).", "loop"), func(l conn.LoopStats) float64 { return l.Busy.Seconds() }),
	gauge(desc("loop_connections", "Open connections of an event loop.", "loop"), func(l conn.LoopStats) int { return l.Connections }),
}

var lookupdMetrics = []metric[lookupd.State]{
	gauge(desc("nsqlookupd_connected", "1 while the nsqlookupd is kept informed.", "address"), func(l lookupd.State) float64 { return oneIf(l.Connected) }),
	counter(desc("nsqlookupd_failures_total", "Connections to the nsqlookupd that ended, or did not come about.", "address"), func(l lookupd.State) uint64 { return l.Failures }),
}

var topicMetrics = []metric[*broker.Stats]{
	gauge(desc("topic_disk_files", "Files of messages on disk, of the topic and its channels.", "topic"), func(s *broker.Stats) int { return s.Disk.Segments }),
	gauge(desc("topic_disk_bytes", "Bytes of messages on disk, of the topic and its channels.", "topic"), func(s *broker.Stats) int64 { return s.Disk.Bytes }),
	gauge(desc("topic_disk_needed_bytes", "Bytes of messages on disk in files with a message that some channel has not finished; the rest is retained.", "topic"), func(s *broker.Stats) int64 { return s.Needed }),
	gauge(desc("topic_disk_open_files", "Files of messages on disk that are open.", "topic"), func(s *broker.Stats) int { return s.Disk.OpenFiles }),
	counter(desc("topic_disk_read_bytes_total", "Bytes of the bodies of messages that were read back from disk.", "topic"), func(s *broker.Stats) uint64 { return s.Disk.ReadBytes }),
	gauge(desc("topic_replication_pending_bytes", "Bytes of messages that most replicas do not have yet, with --durability=replicated.", "topic"), func(s *broker.Stats) int64 { return s.Disk.Pending }),
	counter(desc("topic_disk_syncs_total", "Syncs of the topic's log to stable storage, or blocks of it that most replicas have.", "topic"), func(s *broker.Stats) uint64 { return s.Disk.Fsyncs }),
	counter(desc("topic_replication_seconds_total", "Seconds that blocks of the log took until most replicas had each, in sum, with --durability=replicated.", "topic"), func(s *broker.Stats) float64 { return s.Disk.StoredSeconds }),
	counter(desc("topic_disk_lost_bytes_total", "Bytes in files of messages that were put aside as damaged.", "topic"), func(s *broker.Stats) uint64 { return s.Disk.LostBytes }),
	counter(desc("topic_messages_lost_total", "Messages that could not be read back from disk.", "topic"), func(s *broker.Stats) uint64 { return s.Counters.Lost }),
	counter(desc("topic_messages_accepted_total", "Messages accepted from publishers.", "topic"), func(s *broker.Stats) uint64 { return s.Counters.Accepted }),
	counter(desc("topic_accepted_bytes_total", "Bytes of the bodies of accepted messages.", "topic"), func(s *broker.Stats) uint64 { return s.Counters.AcceptedBytes }),
	counter(desc("topic_messages_released_total", "Messages released by the token bucket.", "topic"), func(s *broker.Stats) uint64 { return s.Counters.Released }),
	counter(desc("topic_messages_expired_total", "Messages whose TTL was over while they waited for their token, and which left without one.", "topic"), func(s *broker.Stats) uint64 { return s.Counters.Expired }),
	counter(desc("topic_messages_refused_total", "Messages refused: queue full or over the limit.", "topic"), func(s *broker.Stats) uint64 { return s.Counters.Refused }),
	counter(desc("topic_messages_delivered_total", "First deliveries written to subscribers.", "topic"), func(s *broker.Stats) uint64 { return s.Delivered }),
	counter(desc("topic_messages_exceeded_total", "First deliveries with a delivery latency above the SLO's.", "topic"), func(s *broker.Stats) uint64 { return s.Exceeded }),
	gauge(desc("topic_memory_bytes", "Bytes that the topic's messages take in memory, with those of its channels.", "topic"), func(s *broker.Stats) int64 { return s.Memory }),
	gauge(desc("topic_waiting_messages", "Messages that wait for tokens or for a channel.", "topic"), func(s *broker.Stats) int { return s.Waiting }),
	gauge(desc("topic_publishers", "Open connections that have published.", "topic"), func(s *broker.Stats) int { return s.Publishers }),
}

// shareMetrics describe a topic with a limit.
var shareMetrics = []metric[*broker.Stats]{
	gauge(desc("topic_share_rate", "Share of the contract's rate, msg/s; absent without a limit.", "topic"), func(s *broker.Stats) float64 { return s.Share.Rate.PerSecond() }),
	gauge(desc("topic_share_burst_messages", "Share of the contract's burst.", "topic"), func(s *broker.Stats) int64 { return s.Share.Burst }),
}

func pacing(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("srtm_pacing_"+name, help, []string{"topic"}, nil)
}

func unitRate(p broker.Paced) float64 {
	if p.Paced {
		return p.Rate
	}
	return 0
}

var pacingMetrics = []metric[broker.Paced]{
	gauge(pacing("paced", "1 while the broker advises the topic's publishers of their rates."), func(p broker.Paced) float64 { return oneIf(p.Paced) }),
	gauge(pacing("rate", "What a publisher may send for each unit of its weight, msg/s; 0 while no publisher is paced."), unitRate),
	gauge(pacing("sum_weights", "Weight of all publishers that send, together."), func(p broker.Paced) float64 { return p.SumWeights }),
	gauge(pacing("limited_share", "Part, 0 to 1, of the messages that come from publishers that want less than they may send."), func(p broker.Paced) float64 { return p.LimitedShare }),
	counter(pacing("refused_total", "Messages refused by police: more than the publisher may send."), func(p broker.Paced) uint64 { return p.Refused }),
}

var channelMetrics = []metric[*broker.ChannelStats]{
	gauge(desc("channel_ready_messages", "Messages that wait for a subscriber with credit.", "topic", "channel"), func(c *broker.ChannelStats) int { return c.Ready }),
	gauge(desc("channel_in_flight_messages", "Messages that subscribers hold.", "topic", "channel"), func(c *broker.ChannelStats) int { return c.InFlight }),
	gauge(desc("channel_deferred_messages", "Messages held back until later.", "topic", "channel"), func(c *broker.ChannelStats) int { return c.Deferred }),
	counter(desc("channel_messages_finished_total", "Messages that subscribers have finished.", "topic", "channel"), func(c *broker.ChannelStats) uint64 { return c.Counters.Finished }),
	counter(desc("channel_messages_requeued_total", "Messages given back by subscribers.", "topic", "channel"), func(c *broker.ChannelStats) uint64 { return c.Counters.Requeued }),
	counter(desc("channel_messages_timed_out_total", "Messages taken back from subscribers after the message timeout.", "topic", "channel"), func(c *broker.ChannelStats) uint64 { return c.Counters.TimedOut }),
	counter(desc("channel_messages_lost_total", "Messages that could not be read back from disk.", "topic", "channel"), func(c *broker.ChannelStats) uint64 { return c.Counters.Lost }),
	counter(desc("channel_messages_dropped_total", "Messages that a full ephemeral channel had no room for.", "topic", "channel"), func(c *broker.ChannelStats) uint64 { return c.Counters.Dropped }),
	counter(desc("channel_messages_expired_total", "Messages that the channel discarded: their TTL was over.", "topic", "channel"), func(c *broker.ChannelStats) uint64 { return c.Counters.Expired }),
	counter(desc("channel_messages_given_up_total", "Messages that the channel discarded after max_attempts deliveries, without a dead letter topic.", "topic", "channel"), func(c *broker.ChannelStats) uint64 { return c.Counters.GivenUp }),
	counter(desc("channel_messages_dead_lettered_total", "Messages that went to the dead letter topic after max_attempts deliveries.", "topic", "channel"), func(c *broker.ChannelStats) uint64 { return c.Counters.DeadLettered }),
	gauge(desc("channel_unfinished_messages", "Messages from the oldest that the channel has not finished to the newest that it has been given.", "topic", "channel"), func(c *broker.ChannelStats) int { return c.Unfinished }),
	gauge(desc("channel_cursor_full", "1 while the channel gets no more messages, since it is --max-unfinished messages past one that is not finished.", "topic", "channel"), func(c *broker.ChannelStats) float64 { return oneIf(c.Full) }),
	gauge(desc("channel_subscribers", "Subscribers of the channel.", "topic", "channel"), func(c *broker.ChannelStats) int { return c.Consumers }),
}

// Describe sends nothing, because topics, and so series, come and go.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

func (c *collector) Collect(out chan<- prometheus.Metric) {
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	conns := c.conns.Stats()
	collect(out, connMetrics, conns)
	for cause, n := range conns.SlowTurns {
		counter(descSlowTurns, n, conn.Cause(cause).String())
	}
	for _, l := range conns.Loops {
		collect(out, loopMetrics, l, strconv.Itoa(l.Number))
	}
	counter(descBodies, c.bodies.Refused())
	counter(descAnswers, c.answers.refused.Load())
	if c.cfg.Connections != nil {
		open, refused := c.cfg.Connections()
		gauge(descWeb, float64(open))
		counter(descWebRefused, refused)
	}
	topics, channels := c.broker.Refused()
	counter(descNames, topics, "topic")
	counter(descNames, channels, "channel")
	if c.cfg.Lookupds != nil {
		for _, l := range c.cfg.Lookupds() {
			collect(out, lookupdMetrics, l, l.Address)
		}
	}
	if c.cfg.Auth != nil {
		for result, n := range c.cfg.Auth() {
			counter(descAuth, n, result)
		}
	}
	for i, n := range c.stamps.Info().Counters.Arrivals {
		counter(descStamps, n, stamp.Source(i).String())
	}
	gauge(descDisk, oneIf(c.broker.Health() == nil))
	gauge(descUnreadable, float64(c.broker.Unreadable()))
	bytes, limit := c.broker.Memory()
	gauge(descMemory, float64(bytes))
	if limit > 0 {
		gauge(descMemoryMost, float64(limit))
	}
	seriesLeft := c.cfg.MaxSeries
	if seriesLeft == 0 {
		seriesLeft = math.MaxInt
	}
	noTopics, noChannels := 0, 0
	for _, t := range c.broker.Topics() {
		if seriesLeft == 0 {
			noTopics++
			continue
		}
		seriesLeft--
		s := t.Stats()
		collect(out, topicMetrics, &s, s.Name)
		if s.Limited {
			collect(out, shareMetrics, &s, s.Name)
		}
		for kind, n := range map[string]uint64{
			"no_space": s.Disk.NoSpace, "error": s.Disk.AppendErrors + s.Disk.ReadErrors + s.Disk.SyncErrors + s.Disk.KeepErrors,
			"torn": s.Disk.Torn, "quarantined": s.Disk.Quarantined, "missing": s.Disk.Missing,
		} {
			counter(descDiskFaults, n, s.Name, kind)
		}
		if p := t.Paced(false); s.Limited && p.Mode != broker.PaceOff {
			collect(out, pacingMetrics, p, s.Name)
		}
		for stage, l := range map[string]*histogram.Latency{"access": s.Access, "processing": s.Processing, "delivery": s.Delivery, "consumer": s.Consumer} {
			if l != nil {
				out <- obs.LatencyMetric(l, descLatency, s.Name, stage)
			}
		}
		for i := range s.Channels {
			if seriesLeft == 0 {
				noChannels++
				continue
			}
			seriesLeft--
			collect(out, channelMetrics, &s.Channels[i], s.Name, s.Channels[i].Name)
		}
	}
	gauge(descNoSeries, float64(noTopics), "topic")
	gauge(descNoSeries, float64(noChannels), "channel")
}
