package reports

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/obs"
)

// Sum adds up TopicStats. Histograms are added bucket by bucket; the reader of the sum
// computes quantiles.
type Sum struct {
	sum                          srtmv1.TopicStats
	interval                     time.Duration
	access, processing, consumer []uint64 // by bucket
	tail                         Tail
}

// Tail is the input for the access delay's fraction of the p99.
type Tail struct {
	delivery []uint64  // by bucket
	access   []float64 // by bucket of delivery; same length
	unknown  bool      // unknown for some of delivery
}

// Add adds t. Requires: t was checked.
func (l *Tail) Add(t *srtmv1.TopicStats) {
	l.delivery = addBuckets(l.delivery, t.Delivery)
	l.access = append(l.access, make([]float64, len(l.delivery)-len(l.access))...)
	if len(t.DeliveryAccess) == 0 && len(t.Delivery.GetIndex()) > 0 {
		l.unknown = true
		return
	}
	for i, sum := range t.DeliveryAccess {
		l.access[t.Delivery.Index[i]] += sum
	}
}

// Fraction returns TopicStatus.p99_access_fraction, or nil if it is unknown.
func (l *Tail) Fraction() *float64 {
	if l.unknown {
		return nil
	}
	mean, ok := histogram.MeanInTail(0.99, l.delivery, l.access)
	if !ok {
		return nil
	}
	return &mean
}

// AddInterval adds the next interval of the same broker. Levels take the newest value.
func (m *Sum) AddInterval(t *srtmv1.TopicStats) {
	m.counts(t)
	m.interval += t.Interval.AsDuration()
	m.sum.Backlog, m.sum.Depth = t.Backlog, t.Depth
	m.sum.Publishers, m.sum.Subscribers = t.Publishers, t.Subscribers
	m.sum.Channels = t.Channels
}

// AddBroker adds the interval of another broker in the same time. Levels add up. The largest
// backlog stays the backlog of one broker, because backlogs of different moments have no
// sum.
func (m *Sum) AddBroker(t *srtmv1.TopicStats) {
	m.counts(t)
	m.interval = max(m.interval, t.Interval.AsDuration())
	m.sum.Backlog += t.Backlog
	m.sum.Depth += t.Depth
	m.sum.Publishers += t.Publishers
	m.sum.Subscribers += t.Subscribers
}

func (m *Sum) counts(t *srtmv1.TopicStats) {
	m.sum.Topic = t.Topic
	m.sum.Offered += t.Offered
	m.sum.Released += t.Released
	m.sum.Delivered += t.Delivered
	m.sum.Exceeded += t.Exceeded
	m.sum.Refused += t.Refused
	m.sum.MaxBacklog = max(m.sum.MaxBacklog, t.MaxBacklog)
	m.access = addBuckets(m.access, t.Access)
	m.processing = addBuckets(m.processing, t.Processing)
	m.consumer = addBuckets(m.consumer, t.Consumer)
	m.tail.Add(t)
}

// addBuckets adds h to sum. Requires: h was checked, so its indices fit the layout.
func addBuckets(sum []uint64, h *srtmv1.Histogram) []uint64 {
	if n := len(h.GetIndex()); n > 0 {
		if last := int(h.Index[n-1]); last >= len(sum) {
			sum = append(sum, make([]uint64, last+1-len(sum))...)
		}
	}
	for i, index := range h.GetIndex() {
		sum[index] += h.Count[i]
	}
	return sum
}

func buckets(sum []uint64) *srtmv1.Histogram {
	h := obs.LatencyProto(histogram.NewLatency()) // for the layout
	for i, n := range sum {
		if n > 0 {
			h.Index = append(h.Index, uint32(i))
			h.Count = append(h.Count, n)
		}
	}
	return h
}

// Stats returns the sum and the access delay's fraction of its p99, or nil if the
// fraction is unknown.
func (m *Sum) Stats() (*srtmv1.TopicStats, *float64) {
	m.sum.Interval = durationpb.New(m.interval)
	m.sum.Access, m.sum.Processing, m.sum.Delivery = buckets(m.access), buckets(m.processing), buckets(m.tail.delivery)
	m.sum.Consumer = buckets(m.consumer)
	if !m.tail.unknown {
		m.sum.DeliveryAccess = m.sum.DeliveryAccess[:0]
		for _, index := range m.sum.Delivery.Index {
			m.sum.DeliveryAccess = append(m.sum.DeliveryAccess, m.tail.access[index])
		}
	}
	return &m.sum, m.tail.Fraction()
}
