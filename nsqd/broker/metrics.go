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

// metrics are a topic's measurements. Counters are kept by the machine itself;
// here are the latencies, under a lock of their own: a report or a look at them
// walks histograms for a tenth of a millisecond, and only who records just then
// waits for that.
type metrics struct {
	// Atomic; any goroutine adds.
	sources [stamp.Sources]atomic.Uint64 // arrivals by source of the stamp
	// slo is terms.slo's latency; written under runner.mu. A stale read counts a message
	// by the SLO of a moment ago.
	slo atomic.Int64

	mu struct {
		sync.Mutex
		// since is the interval's, reset by take; total is the life's. Each is
		// complete after total.merge(since).
		since, total latencies
		// accessPart goes with since.delivery; nil until the first delivery.
		accessPart *obs.Part
	}
}

// latencies are made when the first is recorded.
type latencies struct {
	access, processing, delivery, consumer *obs.Latency // all nil until init

	delivered uint64 // first deliveries written to sockets
	exceeded  uint64 // of those, later than the SLO's latency
}

// reported is what the last report had, to give differences.
type reported struct {
	at       mono.Time
	counters queue.Counters
	quiet    bool // no message came, went or waited
	levels   levels
}

// levels are what a report says of a topic as it is.
type levels struct {
	publishers, subscribers int
	depth                   uint64
	channels                uint64 // a hash of their names and readers
	prepared                bool
}

// init must be called before anything is recorded; it may be called again.
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
			n++ // of a batch, and of all that need not wait
		}
		f.mu.since.access.RecordMany(d, n)
	}
	f.mu.Unlock()
}

// wrote records deliveries that are on a socket now. Repeated deliveries are
// left out: their latency is the subscriber's doing.
//
// Delivery latency = access delay + processing delay (design, section 2). What
// a deferred message was asked to wait is neither, nor for how long there was no
// consumer with credit: that is counted beside it, and no SLO is owed for it.
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
			n++ // of a batch
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
