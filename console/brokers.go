package console

import (
	"cmp"
	"context"
	"net/url"
	"slices"
	"strings"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// bar draws a broker's capacity, in percent of the widest bar.
type bar struct {
	*srtmv1.Broker
	McapWide, AllocWide, OfferedPos float64
}

func barsOf(brokers []*srtmv1.Broker) (bars []bar) {
	widest := 1.0
	for _, b := range brokers {
		widest = max(widest, float64(b.Mcap), float64(b.Allocated), b.OfferedRate)
	}
	for _, b := range brokers {
		bars = append(bars, bar{
			Broker: b, McapWide: 100 * float64(b.Mcap) / widest,
			AllocWide: 100 * float64(b.Allocated) / widest, OfferedPos: 100 * b.OfferedRate / widest,
		})
	}
	return bars
}

// compareBrokers compares brokers by the columns of a list.
var compareBrokers = map[string]func(a, b *srtmv1.Broker) int{
	"id":        func(a, b *srtmv1.Broker) int { return cmp.Compare(a.Id, b.Id) },
	"mcap":      func(a, b *srtmv1.Broker) int { return cmp.Compare(a.Mcap, b.Mcap) },
	"allocated": func(a, b *srtmv1.Broker) int { return cmp.Compare(a.Allocated, b.Allocated) },
	"offered":   func(a, b *srtmv1.Broker) int { return cmp.Compare(a.OfferedRate, b.OfferedRate) },
	"topics":    func(a, b *srtmv1.Broker) int { return cmp.Compare(len(a.Topics), len(b.Topics)) },
	"version":   func(a, b *srtmv1.Broker) int { return cmp.Compare(a.Version, b.Version) },
}

type brokersData struct {
	cluster
	Order  order
	Filter string // part of the ids
	Bars   []bar
	Pager  pager
}

// brokerList lists the brokers.
func (w *watched) brokerList(_ context.Context, q url.Values, _ user) (view, error) {
	d := brokersData{cluster: w.cluster(), Filter: q.Get("q"), Order: orderOf("/ui/brokers", q, "id")}
	var matching []*srtmv1.Broker
	for _, b := range d.Brokers {
		if strings.Contains(b.Id, d.Filter) {
			matching = append(matching, b)
		}
	}
	sorted(matching, d.Order, compareBrokers)
	matching, d.Pager = paged(slices.Clip(matching), "/ui/brokers", q, "from")
	d.Bars = barsOf(matching)
	return view{Template: "brokers", Title: "Brokers", Data: d}, nil
}
