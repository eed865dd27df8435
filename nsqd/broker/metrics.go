package broker

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/queue"
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
		accessPart *obs.Part
	}
}

// latencies are allocated by the first record.
type latencies struct {
	access, processing, delivery, consumer *obs.Latency // all nil until init

	delivered uint64 // first deliveries written to sockets
	exceeded  uint64 // first deliveries later than the SLO's latency
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
		l.access, l.processing, l.delivery, l.consumer = obs.NewLatency(), obs.NewLatency(), obs.NewLatency(), obs.NewLatency()
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
	l.exceeded += o.exceeded
}

func (l *latencies) reset() {
	if l.access != nil {
		l.access.Reset()
		l.processing.Reset()
		l.delivery.Reset()
		l.consumer.Reset()
	}
	l.delivered, l.exceeded = 0, 0
}

func (f *metrics) arrived(source stamp.Source, n int) {
	f.sources[source].Add(uint64(n))
}

func (f *metrics) released(releases []queue.Release) {
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
		f.mu.since.access.RecordMany(d, n)
	}
	f.mu.Unlock()
}

// wrote records deliveries that were written to a socket. Repeated deliveries are left out,
// since the subscriber causes their latency.
//
// Delivery latency = access delay + processing delay (design, section 2). It excludes the
// requested delay of a deferred message. It also excludes the time without a ready
// consumer, which is recorded separately and is not subject to the SLO.
func (f *metrics) wrote(now mono.Time, deliveries []sent) {
	slo := time.Duration(f.slo.Load())
	f.mu.Lock()
	defer f.mu.Unlock()
	l := &f.mu.since
	l.init()
	if f.mu.accessPart == nil {
		f.mu.accessPart = new(obs.Part)
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
		l.processing.RecordMany(processing, n)
		l.delivery.RecordMany(delivery, n)
		l.consumer.RecordMany(d.consumer, n)
		f.mu.accessPart.RecordMany(delivery, d.access, n)
		l.delivered += uint64(n)
		if slo > 0 && delivery > slo {
			l.exceeded += uint64(n)
		}
	}
}
