package broker

import (
	"fmt"
	"hash/maphash"
	"io"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/stats"
	"github.com/srtm-io/srtm/tokenbucket"
)

// metrics are a topic's measurements. The machine keeps the counters; metrics keep the
// latencies, under a separate lock. A report reads histograms for a tenth of a millisecond,
// and only a goroutine that records a latency at this moment waits.
type metrics struct {
	// Atomic; any goroutine adds.
	sources [stamp.Sources]atomic.Uint64 // arrivals by source of the stamp
	// slo is terms.slo's latency; written under runner.mu. After a stale read, a message is
	// compared with the previous SLO.
	slo atomic.Int64

	mu struct {
		sync.Mutex
		// since covers the interval and is reset by a report; total covers the topic's
		// life. total is complete after total.merge(since).
		since, total latencies
		// accessPart belongs to since.delivery; nil until the first delivery.
		accessPart *histogram.Part
	}
}

// latencies are allocated by the first record.
type latencies struct {
	access, processing, delivery, consumer *histogram.Latency // all nil until init

	delivered uint64 // first deliveries written to sockets
	late      uint64 // first deliveries later than the SLO's latency
}

// reported holds the values of the last report, to compute differences.
type reported struct {
	at       mono.Time
	counters queue.Counters
	quiet    bool // no message arrived, left or waited
	levels   levels
}

// levels are the current values in a report.
type levels struct {
	publishers, subscribers int
	depth                   uint64
	channels                uint64 // hash of channel names and readers
	prepared                bool
}

// init must be called before the first record; further calls have no effect.
func (l *latencies) init() {
	if l.access == nil {
		l.access, l.processing, l.delivery, l.consumer = histogram.NewLatency(), histogram.NewLatency(), histogram.NewLatency(), histogram.NewLatency()
	}
}

func (l *latencies) merge(o *latencies) {
	if o.access != nil {
		l.init()
		l.access.Merge(o.access)
		l.processing.Merge(o.processing)
		l.delivery.Merge(o.delivery)
		l.consumer.Merge(o.consumer)
	}
	l.delivered += o.delivered
	l.late += o.late
}

func (l *latencies) reset() {
	if l.access != nil {
		l.access.Reset()
		l.processing.Reset()
		l.delivery.Reset()
		l.consumer.Reset()
	}
	l.delivered, l.late = 0, 0
}

func (f *metrics) recordArrived(source stamp.Source, n int) {
	f.sources[source].Add(uint64(n))
}

func (f *metrics) recordReleased(releases []queue.Release) {
	if len(releases) == 0 {
		return
	}
	f.mu.Lock()
	f.mu.since.init()
	for i, n := 0, 1; i < len(releases); i, n = i+n, 1 {
		d := releases[i].Access
		for i+n < len(releases) && releases[i+n].Access == d {
			n++ // messages of a batch, or messages without a wait
		}
		f.mu.since.access.RecordMany(d, int64(n))
	}
	f.mu.Unlock()
}

// recordWritten records deliveries that were written to a socket. Repeated deliveries are left out,
// since the subscriber causes their latency.
//
// Delivery latency = access delay + processing delay (design, section 2). It excludes the
// requested delay of a deferred message. It also excludes the time without a ready
// consumer, which is recorded separately and is not subject to the SLO.
func (f *metrics) recordWritten(now mono.Time, deliveries []sent) {
	slo := time.Duration(f.slo.Load())
	f.mu.Lock()
	defer f.mu.Unlock()
	l := &f.mu.since
	l.init()
	if f.mu.accessPart == nil {
		f.mu.accessPart = new(histogram.Part)
	}
	for i, n := 0, 1; i < len(deliveries); i, n = i+n, 1 {
		d := deliveries[i]
		for i+n < len(deliveries) && deliveries[i+n] == d {
			n++ // messages of a batch
		}
		if !d.first {
			continue
		}
		processing := max(0, now.Sub(d.due)-d.consumer)
		delivery := d.access + processing
		l.processing.RecordMany(processing, int64(n))
		l.delivery.RecordMany(delivery, int64(n))
		l.consumer.RecordMany(d.consumer, int64(n))
		f.mu.accessPart.RecordMany(delivery, d.access, int64(n))
		l.delivered += uint64(n)
		if slo > 0 && delivery > slo {
			l.late += uint64(n)
		}
	}
}

// Stats is the operators' view of a topic: counters since its creation, and current depths.
type Stats struct {
	Name        string
	Paused      bool
	Waiting     int   // messages that wait for tokens, or for a channel
	Beyond      int   // waiting messages that are not in memory
	Memory      int64 // bytes of messages in memory, including channels
	Counters    queue.Counters
	Channels    []ChannelStats // by name
	Publishers  int
	Subscribers int
	Retain      metadata.Retention // effective retention
	Expiry      expiry.Settings

	Disk   commitlog.Stats // zero without messages on disk
	Needed int64           // bytes of Disk.Bytes that are needed, not only retained

	Limited bool
	Share   tokenbucket.Share
	Tokens  tokenbucket.Tokens
	SLO     SLO

	// The histograms are nil until the first release.
	Delivered, Exceeded uint64 // first deliveries; deliveries later than the SLO
	Access, Processing  *histogram.Latency
	Delivery, Consumer  *histogram.Latency
	Sources             [stamp.Sources]uint64
}

// ChannelStats is the operators' view of a channel.
type ChannelStats struct {
	Name     string
	Paused   bool
	Ready    int
	Beyond   int // ready messages that are not in memory
	InFlight int
	Deferred int
	// Unfinished is the number of messages between the channel's position and its oldest
	// unfinished message. Full: the channel gets no messages because Unfinished has reached
	// StorageConfig.MaxUnfinished.
	Unfinished int
	Full       bool
	Expiry     expiry.Settings // effective settings
	Counters   queue.ChannelCounters
	Consumers  int
	EndToEnd   stats.Summary // recent latency from arrival to FIN; empty if not measured
}

// Stats returns the topic's current state. The histograms are copies.
func (t *Topic) Stats() Stats {
	now := t.runner.shared.now()
	t.runner.mu.Lock()
	core := t.runner.mu.core
	s := Stats{
		Name:        t.runner.name,
		Paused:      core.Paused(),
		Waiting:     core.Backlog().Waiting(),
		Beyond:      core.Backlog().Beyond(),
		Memory:      t.runner.mu.held,
		Counters:    core.Backlog().Counters(),
		Publishers:  t.intake.publishers,
		Subscribers: len(t.runner.mu.consumers),
		Limited:     core.Contract().Limited(),
		Share:       core.Contract().Share(),
		SLO:         t.terms.slo,
		Expiry:      t.runner.mu.expiry.topic,
	}
	if s.Limited {
		s.Tokens = core.Contract().Tokens(now)
	}
	if t.store != nil {
		s.Retain = metadata.Retention(t.store.retention())
		if log := t.store.log.Load(); log != nil {
			s.Disk, s.Needed = log.Stats(), log.Needed()
		}
		s.Disk.Missing += t.store.missing
	}
	for _, c := range core.Channels() {
		cs := ChannelStats{
			Name:       c.Name(),
			Paused:     c.Paused(),
			Ready:      c.Ready(),
			Beyond:     c.Beyond(),
			InFlight:   c.InFlight(),
			Deferred:   c.Deferred(),
			Unfinished: c.Unfinished(),
			Full:       c.Full(),
			Expiry:     t.runner.mu.expiry.of(c.Name()),
			Counters:   c.Counters(),
			Consumers:  c.Consumers().Len(),
		}
		if w := t.channels.endToEnd[c]; w != nil {
			cs.EndToEnd = w.Summary(now, t.runner.shared.cfg.EndToEnd)
		}
		s.Channels = append(s.Channels, cs)
	}
	t.runner.mu.Unlock()

	f := &t.runner.metrics
	for i := range f.sources {
		s.Sources[i] = f.sources[i].Load()
	}
	var all latencies
	f.mu.Lock()
	all.merge(&f.mu.total)
	all.merge(&f.mu.since)
	f.mu.Unlock()
	s.Delivered, s.Exceeded = all.delivered, all.late
	s.Access, s.Processing, s.Delivery, s.Consumer = all.access, all.processing, all.delivery, all.consumer
	return s
}

// Report returns the events of every topic since the last call, for the control plane.
// Unless all is set or topics were removed, Report leaves out unchanged topics and returns
// changes = true. Only one goroutine may call Report.
func (b *Broker) Report(all bool) (stats []*srtmv1.TopicStats, changes bool) {
	topics := b.Topics()
	before := b.reported // sorted by name, like topics
	for _, t := range topics {
		if len(before) > 0 && before[0] == t {
			before = before[1:]
		}
	}
	changes = !all && len(before) == 0
	b.reported = topics
	for _, t := range topics {
		if !changes || !t.isUnchanged() {
			stats = append(stats, t.report())
		}
	}
	return stats, changes
}

// isUnchanged reports whether the topic is unchanged since the last report, which had no
// messages.
func (t *Topic) isUnchanged() bool {
	last := &t.reported
	if !last.quiet {
		return false
	}
	now := t.runner.shared.now()
	f := &t.runner.metrics
	f.mu.Lock()
	delivered := f.mu.since.delivered
	f.mu.Unlock()
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	core := t.runner.mu.core
	if delivered > 0 || core.Backlog().Counters() != last.counters || core.Backlog().Waiting() > 0 || t.levelsLocked() != last.levels {
		return false
	}
	last.at = now
	return true
}

// channelsSeed is the seed of the hashes in levels.
var channelsSeed = maphash.MakeSeed()

func (t *Topic) levelsLocked() levels {
	current := levels{publishers: t.intake.publishers, subscribers: len(t.runner.mu.consumers), prepared: t.runner.mu.core.Contract().Limited()}
	for _, c := range t.runner.mu.core.Channels() {
		current.depth += uint64(c.Depth())
		current.channels = current.channels*31 + maphash.String(channelsSeed, c.Name()) + uint64(c.Consumers().Readers())
	}
	return current
}

func (t *Topic) report() *srtmv1.TopicStats {
	now := t.runner.shared.now()
	last := &t.reported
	t.runner.mu.Lock()
	core := t.runner.mu.core
	counters := core.Backlog().Counters()
	r := &srtmv1.TopicStats{
		Topic:    t.runner.name,
		Offered:  counters.Accepted - last.counters.Accepted,
		Released: counters.Released - last.counters.Released,
		Refused:  counters.Refused - last.counters.Refused,
		Backlog:  uint64(core.Backlog().Waiting()),
	}
	current := t.levelsLocked()
	r.Publishers, r.Subscribers, r.Depth, r.Unprepared = uint32(current.publishers), uint32(current.subscribers), current.depth, !current.prepared
	maxBacklog := core.Backlog().TakeMaxWaiting()
	r.MaxBacklog = uint64(maxBacklog)
	if r.Offered > 0 {
		r.BurstNeeded = uint64(core.Contract().BurstNeeded(maxBacklog))
	}
	for _, c := range core.Channels() {
		r.Channels = append(r.Channels, c.Name())
		r.ChannelSubscribers = append(r.ChannelSubscribers, uint32(c.Consumers().Readers()))
	}
	t.runner.mu.Unlock()

	f := &t.runner.metrics
	f.mu.Lock()
	defer f.mu.Unlock()
	l := &f.mu.since
	r.Interval = durationpb.New(interval(last.at, now))
	r.Delivered, r.Exceeded = l.delivered, l.late
	if l.access != nil {
		r.Access, r.Processing, r.Delivery = obs.LatencyProto(l.access), obs.LatencyProto(l.processing), obs.LatencyProto(l.delivery)
		r.Consumer = obs.LatencyProto(l.consumer)
	}
	if part := f.mu.accessPart; part != nil {
		r.DeliveryAccess = part.Of(r.Delivery.GetIndex())
		part.Reset()
	}
	f.mu.total.merge(l)
	l.reset()
	*last = reported{
		at: now, counters: counters, levels: current,
		quiet: r.Offered+r.Released+r.Refused+r.Delivered+r.MaxBacklog+r.Backlog == 0,
	}
	return r
}

// interval returns the length of a reporting interval.
func interval(from, to mono.Time) time.Duration { return max(0, to.Sub(from)) }

// Trace writes a line for every message that leaves a topic,
//
//	topic,arrival,eligible,released
//
// with times in nanoseconds of CLOCK_MONOTONIC, so that the lines of all brokers of a
// machine can be merged. eligible is the time of the message's token. released is the time
// by which the release was judged, read under the topic's lock. One write contains the
// lines of a step, before subscribers are notified. So a killed broker has written all its
// releases.
type Trace struct {
	// Set once.
	out io.Writer
	log *slog.Logger

	mu struct {
		sync.Mutex
		buf    []byte
		failed bool
	}
}

// NewTrace returns a trace that writes to out. A failed write is logged and ends the trace,
// since a trace with gaps would prove nothing.
func NewTrace(out io.Writer, log *slog.Logger) *Trace { return &Trace{out: out, log: log} }

func (t *Trace) write(topic string, releases []queue.Release) {
	t.mu.Lock()
	if t.mu.failed {
		t.mu.Unlock()
		return
	}
	b := t.mu.buf[:0]
	for _, r := range releases {
		b = append(append(b, topic...), ',')
		b = append(strconv.AppendInt(b, int64(r.Arrival), 10), ',')
		b = append(strconv.AppendInt(b, int64(r.Eligible), 10), ',')
		b = append(strconv.AppendInt(b, int64(r.Released), 10), '\n')
	}
	t.mu.buf = b
	// The lock keeps lines of two topics apart. No other goroutine waits for it.
	_, err := t.out.Write(b)
	t.mu.failed = err != nil
	t.mu.Unlock()
	if err != nil {
		t.log.Error("cannot write the release trace; tracing stopped", "error", fmt.Errorf("write: %w", err))
	}
}
