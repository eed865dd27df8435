package console

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/srtm-io/srtm/console/history"
)

// brokerSeries begins the names of brokers' histories. No topic has such a name.
const brokerSeries = "broker:"

// ownSeries is the name of the history of the broker that serves this console.
const ownSeries = brokerSeries

// isBroker reports whether a history belongs to a broker.
func isBroker(name string) bool { return strings.HasPrefix(name, brokerSeries) }

// reading holds the broker's metrics at one time.
type reading struct {
	time   time.Time
	sums   map[string]float64             // of all topics and channels, by metric
	delays map[string]map[float64]float64 // messages up to so many seconds, by part
	busy   map[string]float64             // seconds of event loops
}

func readingOf(families []*dto.MetricFamily, now time.Time) reading {
	r := reading{now, map[string]float64{}, map[string]map[float64]float64{}, map[string]float64{}}
	for _, f := range families {
		for _, m := range f.Metric {
			label := func(name string) string {
				for _, l := range m.Label {
					if l.GetName() == name {
						return l.GetValue()
					}
				}
				return ""
			}
			switch f.GetName() {
			case busyMetric:
				r.busy[label("loop")] = m.GetCounter().GetValue()
			case "srtm_nsqd_topic_latency_seconds":
				r.count(label("part"), m.GetHistogram())
			default:
				r.sums[f.GetName()] += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return r
}

// count adds a histogram to its part. Messages beyond the last bound count at the last
// bound.
func (r reading) count(part string, h *dto.Histogram) {
	if r.delays[part] == nil {
		r.delays[part] = map[float64]float64{}
	}
	for i, b := range h.GetBucket() {
		n := b.GetCumulativeCount()
		if i == len(h.GetBucket())-1 {
			n = h.GetSampleCount()
		}
		r.delays[part][b.GetUpperBound()] += float64(n)
	}
}

// sampleOwn adds a sample of the broker's own metrics to its history.
func (c *Console) sampleOwn(now time.Time) {
	families, _ := c.cfg.Own.Gather() // faulty metrics are left out; /metrics reports them
	c.watched.sampleBroker(ownSeries, readingOf(families, now))
}

// sampleBroker adds a sample to a broker's history. The history starts again after a
// pause, because there is no previous reading, and when counters fall, because a topic was
// deleted.
func (w *watched) sampleBroker(series string, r reading) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.topics[series]
	if t == nil {
		t = &tracked{}
		w.topics[series] = t
	}
	before, elapsed := t.reading, r.time.Sub(t.reading.time).Seconds()
	if elapsed < (2*tick).Seconds() && maps.Equal(r.sums, before.sums) && maps.Equal(r.busy, before.busy) { // a remembered answer
		return
	}
	t.reading, t.viewed = r, r.time
	shares := map[string]float32{}
	for loop, busy := range r.busy {
		if last, found := before.busy[loop]; found && busy >= last && elapsed > 0 {
			shares["loop "+loop] = float32(min(1, (busy-last)/elapsed))
		}
	}
	if elapsed <= 0 || elapsed > (2*seldom*tick).Seconds() {
		return
	}
	whole := true
	rate := func(metric string) float32 {
		name := "srtm_nsqd_topic_messages_" + metric + "_total"
		growth := r.sums[name] - before.sums[name]
		whole = whole && growth >= 0
		return float32(growth / elapsed)
	}
	sample := history.Sample{
		At: r.time.UnixMilli(), Offered: rate("accepted") + rate("refused"), Released: rate("released"), Delivered: rate("delivered"), Refused: rate("refused"),
		Backlog: float32(r.sums["srtm_nsqd_topic_waiting_messages"] + r.sums["srtm_nsqd_channel_ready_messages"]),
	}
	for part, name := range [history.Parts]string{history.Access: "access", history.Broker: "processing", history.Consumer: "consumer", history.Delivery: "delivery"} {
		sample.Delays[part] = delaysOf(before.delays[name], r.delays[name])
	}
	if whole {
		t.series.Add(sample, shares)
	}
}

// delaysOf returns the quantiles, in ms, of the messages between two readings. It assumes
// an even spread within a bucket, and the last bound for messages beyond it.
func delaysOf(before, now map[float64]float64) (d history.Delay) {
	bounds := slices.Sorted(maps.Keys(now))
	if len(bounds) == 0 {
		return d
	}
	growth := func(bound float64) float64 { return now[bound] - before[bound] }
	all := growth(bounds[len(bounds)-1])
	if all <= 0 {
		return d
	}
	quantile := func(q float64) float32 {
		i, _ := slices.BinarySearchFunc(bounds, q*all, func(bound, want float64) int { return cmp.Compare(growth(bound), want) })
		low, below := 0.0, 0.0
		if i > 0 {
			low, below = bounds[i-1], growth(bounds[i-1])
		}
		return float32(1000 * (low + (bounds[i]-low)*(q*all-below)/(growth(bounds[i])-below)))
	}
	return history.Delay{P50: quantile(0.5), P99: quantile(0.99), P999: quantile(0.999)}
}
