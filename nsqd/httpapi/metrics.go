package httpapi

import (
	"github.com/prometheus/client_golang/prometheus"
	"math"
	"strconv"

	"github.com/srtm-io/srtm/internal/nsqhttp"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// collector turns the broker's stats into metrics when they are asked for.
// Labels are topics and channels, never clients.
type collector struct {
	cfg    *Config
	broker *broker.Broker
	conns  *conn.Server
	stamps *hook.Stamper
	bodies *nsqhttp.Bodies
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("srtm_nsqd_"+name, help, labels, nil)
}

var (
	descConnections = desc("connections", "Open client connections.")
	descAccepted    = desc("connections_accepted_total", "Client connections accepted.")
	descRefused     = desc("connections_refused_total", "Client connections refused: over the limit, or accept failed.")
	descFaults      = desc("connections_faulted_total", "Client connections closed for a fatal protocol error.")
	descWeb         = desc("http_connections", "Open connections for HTTP.")
	descWebRefused  = desc("http_connections_refused_total", "Connections for HTTP refused: there are as many as there may be.")
	descCrowded     = desc("connections_bodies_refused_total", "Client connections closed: the messages that all are sending take as much memory as they may.")
	descBodies      = desc("http_bodies_refused_total", "Requests refused: the bodies of all take as much memory as they may.")
	descNames       = desc("names_refused_total", "Topics and channels not created: there are as many as there may be.", "kind")
	descSlowTurns   = desc("loop_slow_turns_total", "Parts of event loops' turns that took longer than 5 ms: commands, output, timers.", "cause")
	descLoopBusy    = desc("loop_busy_seconds_total", "Processor time that an event loop took; its rate is the loop's utilisation, 1: saturated. The number of loops may follow the load (--io-loops).", "loop")
	descLoopConns   = desc("loop_connections", "Open connections of an event loop.", "loop")
	descLookupd     = desc("nsqlookupd_connected", "1 while the nsqlookupd is kept informed.", "address")
	descLookupdLost = desc("nsqlookupd_failures_total", "Connections to the nsqlookupd that ended, or did not come about.", "address")
	descAuth        = desc("auth_requests_total", "Questions to auth servers, by how they ended.", "result")
	descStamps      = desc("arrivals_total", "Publishes, over TCP and HTTP, by the source of their arrival time; a batch counts once.", "source")

	descMemory       = desc("message_memory_bytes", "Bytes that messages take in memory.")
	descMemoryMost   = desc("message_memory_limit_bytes", "Bytes that messages may take in memory; absent without a limit.")
	descDisk         = desc("disk_healthy", "1 while the disk does what it should, 0 while it is full or fails.")
	descUnreadable   = desc("disk_unreadable_messages", "Messages on disk that could not be read, and are kept in queues of their own.")
	descFiles        = desc("topic_disk_files", "Files of messages on disk, of the topic and its channels.", "topic")
	descBytes        = desc("topic_disk_bytes", "Bytes of messages on disk, of the topic and its channels.", "topic")
	descNeeded       = desc("topic_disk_needed_bytes", "Bytes of messages on disk in files that some channel is not done with; the rest is retained.", "topic")
	descOpenFiles    = desc("topic_disk_open_files", "Files of messages on disk that are open.", "topic")
	descReadBytes    = desc("topic_disk_read_bytes_total", "Bytes of the bodies of messages that were read back from disk.", "topic")
	descPending      = desc("topic_replication_pending_bytes", "Bytes of messages that most replicas do not have yet, with --durability=replicated.", "topic")
	descStored       = desc("topic_disk_syncs_total", "Syncs of the topic's log to stable storage, or blocks of it that most replicas have.", "topic")
	descStoredTime   = desc("topic_replication_seconds_total", "Seconds that blocks of the log took until most replicas had each, in sum, with --durability=replicated.", "topic")
	descDiskFaults   = desc("topic_disk_faults_total", "Faults of the files of messages on disk, by kind: no_space, error, torn, quarantined, missing.", "topic", "kind")
	descLostBytes    = desc("topic_disk_lost_bytes_total", "Bytes in files of messages that were put aside as damaged.", "topic")
	descLost         = desc("topic_messages_lost_total", "Messages that could not be read back from disk.", "topic")
	descAcceptedMsgs = desc("topic_messages_accepted_total", "Messages accepted from publishers.", "topic")
	descAcceptedByte = desc("topic_accepted_bytes_total", "Bytes of the bodies of accepted messages.", "topic")
	descReleased     = desc("topic_messages_released_total", "Messages released by the token bucket.", "topic")
	descRefusedMsgs  = desc("topic_messages_refused_total", "Messages refused: queue full or over the limit.", "topic")
	descDelivered    = desc("topic_messages_delivered_total", "First deliveries written to subscribers.", "topic")
	descExceeded     = desc("topic_messages_exceeded_total", "First deliveries with a delivery latency above the SLO's.", "topic")
	descTopicMemory  = desc("topic_memory_bytes", "Bytes that the topic's messages take in memory, with those of its channels.", "topic")
	descWaiting      = desc("topic_waiting_messages", "Messages that wait for tokens or for a channel.", "topic")
	descPublishers   = desc("topic_publishers", "Open connections that have published.", "topic")
	descRate         = desc("topic_share_rate", "Share of the contract's rate, msg/s; absent without a limit.", "topic")
	descBurst        = desc("topic_share_burst_messages", "Share of the contract's burst.", "topic")
	descLatency      = desc("topic_latency_seconds", "Latency of first deliveries, by part: access (waiting for tokens), processing (the broker), delivery (both: what the SLO is about), and consumer (waiting for one with credit).", "topic", "part")

	descPaced        = pacing("paced", "1 while the topic's publishers are told what they may send.")
	descPaceRate     = pacing("rate", "What a publisher may send for each unit of its weight, msg/s; 0 while no publisher is paced.")
	descSumWeights   = pacing("sum_weights", "Weight of all publishers that send, together.")
	descLimitedShare = pacing("limited_share", "Part, 0 to 1, of the messages that come from publishers that want less than they may send.")
	descPaceRefused  = pacing("refused_total", "Messages refused by police: more than the publisher may send.")

	descReady      = desc("channel_ready_messages", "Messages that wait for a subscriber with credit.", "topic", "channel")
	descInFlight   = desc("channel_in_flight_messages", "Messages that subscribers hold.", "topic", "channel")
	descDeferred   = desc("channel_deferred_messages", "Messages held back until later.", "topic", "channel")
	descFinished   = desc("channel_messages_finished_total", "Messages that subscribers have finished.", "topic", "channel")
	descRequeued   = desc("channel_messages_requeued_total", "Messages given back by subscribers.", "topic", "channel")
	descTimedOut   = desc("channel_messages_timed_out_total", "Messages taken back from subscribers after the message timeout.", "topic", "channel")
	descLostCopies = desc("channel_messages_lost_total", "Messages that could not be read back from disk.", "topic", "channel")
	descDropped    = desc("channel_messages_dropped_total", "Messages that a full ephemeral channel had no room for.", "topic", "channel")
	descUnfinished = desc("channel_unfinished_messages", "Messages from the oldest that the channel has not finished to the newest that it has been given.", "topic", "channel")
	descFull       = desc("channel_cursor_full", "1 while the channel gets no more messages, since it is --max-unfinished messages past one that is not finished.", "topic", "channel")
	descNoSeries   = desc("names_without_series", "Topics, and channels of other topics, beyond the bound on metrics of their own.", "kind")
	descConsumers  = desc("channel_subscribers", "Subscribers of the channel.", "topic", "channel")
)

func pacing(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("srtm_pacing_"+name, help, []string{"topic"}, nil)
}

// Describe sends nothing: the topics, and with them the series, come and go.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

func (c *collector) Collect(out chan<- prometheus.Metric) {
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	conns := c.conns.Stats()
	gauge(descConnections, float64(conns.Connections))
	counter(descAccepted, conns.Accepted)
	counter(descRefused, conns.Refused)
	counter(descFaults, conns.Faults)
	for c, n := range conns.SlowTurns {
		counter(descSlowTurns, n, conn.Cause(c).String())
	}
	for _, l := range conns.Loops {
		number := strconv.Itoa(l.Number)
		out <- prometheus.MustNewConstMetric(descLoopBusy, prometheus.CounterValue, l.Busy.Seconds(), number)
		gauge(descLoopConns, float64(l.Connections), number)
	}
	counter(descBodies, c.bodies.Refused())
	counter(descCrowded, conns.Crowded)
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
			connected := 0.0
			if l.Connected {
				connected = 1
			}
			gauge(descLookupd, connected, l.Address)
			counter(descLookupdLost, l.Failures, l.Address)
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
	healthy := 1.0
	if c.broker.Health() != nil {
		healthy = 0
	}
	gauge(descDisk, healthy)
	gauge(descUnreadable, float64(c.broker.Unreadable()))
	held, most := c.broker.Memory()
	gauge(descMemory, float64(held))
	if most > 0 {
		gauge(descMemoryMost, float64(most))
	}
	room := c.cfg.MaxSeries
	if room == 0 {
		room = math.MaxInt
	}
	noTopics, noChannels := 0, 0
	for _, t := range c.broker.Topics() {
		if room == 0 {
			noTopics++
			continue
		}
		room--
		s := t.Stats()
		counter(descAcceptedMsgs, s.Counters.Accepted, s.Name)
		counter(descAcceptedByte, s.Counters.AcceptedBytes, s.Name)
		counter(descReleased, s.Counters.Released, s.Name)
		counter(descRefusedMsgs, s.Counters.Refused, s.Name)
		counter(descDelivered, s.Delivered, s.Name)
		counter(descExceeded, s.Exceeded, s.Name)
		gauge(descTopicMemory, float64(s.Memory), s.Name)
		gauge(descWaiting, float64(s.Waiting), s.Name)
		gauge(descFiles, float64(s.Disk.Files), s.Name)
		gauge(descBytes, float64(s.Disk.Bytes), s.Name)
		gauge(descNeeded, float64(s.Disk.Needed), s.Name)
		gauge(descOpenFiles, float64(s.Disk.Open), s.Name)
		counter(descReadBytes, s.Disk.ReadBytes, s.Name)
		gauge(descPending, float64(s.Disk.Pending), s.Name)
		counter(descStored, s.Disk.Stored, s.Name)
		out <- prometheus.MustNewConstMetric(descStoredTime, prometheus.CounterValue, s.Disk.StoredSeconds, s.Name)
		for kind, n := range map[string]uint64{
			"no_space": s.Disk.NoSpace, "error": s.Disk.Errors, "torn": s.Disk.Torn,
			"quarantined": s.Disk.Quarantined, "missing": s.Disk.Missing,
		} {
			counter(descDiskFaults, n, s.Name, kind)
		}
		counter(descLostBytes, s.Disk.LostBytes, s.Name)
		counter(descLost, s.Counters.Lost, s.Name)
		gauge(descPublishers, float64(s.Publishers), s.Name)
		if s.Limited {
			gauge(descRate, s.Share.Rate.PerSecond(), s.Name)
			gauge(descBurst, float64(s.Share.Burst), s.Name)
		}
		if p := t.Paced(false); s.Limited && p.Mode != broker.PaceOff {
			paced, rate := 0.0, 0.0
			if p.Paced {
				paced, rate = 1, p.Rate
			}
			gauge(descPaced, paced, s.Name)
			gauge(descPaceRate, rate, s.Name)
			gauge(descSumWeights, p.SumWeights, s.Name)
			gauge(descLimitedShare, p.LimitedShare, s.Name)
			counter(descPaceRefused, p.Refused, s.Name)
		}
		for part, l := range map[string]*obs.Latency{"access": s.Access, "processing": s.Processing, "delivery": s.Delivery, "consumer": s.Consumer} {
			if l != nil {
				out <- l.Metric(descLatency, s.Name, part)
			}
		}
		for _, ch := range s.Channels {
			if room == 0 {
				noChannels++
				continue
			}
			room--
			gauge(descReady, float64(ch.Ready), s.Name, ch.Name)
			gauge(descInFlight, float64(ch.InFlight), s.Name, ch.Name)
			gauge(descDeferred, float64(ch.Deferred), s.Name, ch.Name)
			counter(descFinished, ch.Counters.Finished, s.Name, ch.Name)
			counter(descRequeued, ch.Counters.Requeued, s.Name, ch.Name)
			counter(descTimedOut, ch.Counters.TimedOut, s.Name, ch.Name)
			counter(descLostCopies, ch.Counters.Lost, s.Name, ch.Name)
			counter(descDropped, ch.Counters.Dropped, s.Name, ch.Name)
			gauge(descUnfinished, float64(ch.Unfinished), s.Name, ch.Name)
			full := 0.0
			if ch.Full {
				full = 1
			}
			gauge(descFull, full, s.Name, ch.Name)
			gauge(descConsumers, float64(ch.Consumers), s.Name, ch.Name)
		}
	}
	gauge(descNoSeries, float64(noTopics), "topic")
	gauge(descNoSeries, float64(noChannels), "channel")
}
