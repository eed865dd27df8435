package reports

import (
	"fmt"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
)

// maxChannels bounds the channels in a report of one topic: the maximum of durable
// channels plus as many ephemeral channels.
const maxChannels = 20_000

// Fault: a field of a message has an impossible value.
type Fault struct{ Field, Problem string }

func (e *Fault) Error() string { return e.Field + ": " + e.Problem }

// Check refuses a whole report with a *Fault.
func Check(r *srtmv1.BrokerReport) error {
	seen := make(map[string]bool, len(r.Topics))
	for i, t := range r.Topics {
		field := fmt.Sprintf("report.topics[%d]", i)
		if t.Topic == "" || seen[t.Topic] {
			return &Fault{field + ".topic", fmt.Sprintf("%q is empty or appears twice", t.Topic)}
		}
		seen[t.Topic] = true
		if err := checkStats(field, t); err != nil {
			return err
		}
	}
	return nil
}

func checkStats(field string, t *srtmv1.TopicStats) error {
	if d := t.Interval.AsDuration(); d <= 0 || d > time.Hour {
		return &Fault{field + ".interval", fmt.Sprintf("%v: want above 0, up to 1h", d)}
	}
	if t.Exceeded > t.Delivered {
		return &Fault{field + ".exceeded", fmt.Sprintf("%d of %d delivered", t.Exceeded, t.Delivered)}
	}
	for _, n := range []uint64{t.Offered, t.Released, t.Delivered, t.Refused, t.MaxBacklog, t.Backlog, t.Depth} {
		if n > 1<<48 {
			return &Fault{field, fmt.Sprintf("a count of %d", n)}
		}
	}
	if len(t.Channels) > maxChannels {
		return &Fault{field + ".channels", fmt.Sprintf("%d, at most %d", len(t.Channels), maxChannels)}
	}
	if n := len(t.ChannelSubscribers); n > 0 && n != len(t.Channels) {
		return &Fault{field + ".channel_subscribers", fmt.Sprintf("%d for %d channels", n, len(t.Channels))}
	}
	for _, h := range []struct {
		field string
		value *srtmv1.Histogram
	}{{"access", t.Access}, {"processing", t.Processing}, {"delivery", t.Delivery}, {"consumer", t.Consumer}} {
		if _, err := obs.LatencyFromProto(h.value); err != nil {
			return &Fault{field + "." + h.field, err.Error()}
		}
	}
	if n := len(t.DeliveryAccess); n > 0 && n != len(t.Delivery.GetCount()) {
		return &Fault{field + ".delivery_access", fmt.Sprintf("%d sums for %d buckets", n, len(t.Delivery.GetCount()))}
	}
	for i, sum := range t.DeliveryAccess {
		// Sums of many fractions have rounding errors.
		if limit := float64(t.Delivery.Count[i]); !(sum >= 0 && sum <= limit*(1+1e-6)) {
			return &Fault{fmt.Sprintf("%s.delivery_access[%d]", field, i), fmt.Sprintf("%v for %v deliveries", sum, limit)}
		}
	}
	return nil
}
