package lookup_test

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/lookup"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/loaddistributor/registry"
)

// GET /lookup of one topic, by the real handler over a controller of ten brokers. A lookup must take
// at most 1 ms, whatever the number of topics.
//
//	go test -run='^$' -bench=Lookup -benchtime=2s ./loaddistributor/lookup
func BenchmarkLookup(b *testing.B) {
	for _, topics := range []int{10, 10_000} {
		b.Run(fmt.Sprint(topics), func(b *testing.B) {
			cat, rng := catalog.New(), rand.New(rand.NewPCG(1, 1))
			must := func(e catalog.Event, err error) {
				if err == nil {
					_, err = cat.Apply(e)
				}
				testkit.Must(b, err)
			}
			for i := range 10 {
				must(catalog.BrokerJoined{
					ID: fmt.Sprintf("b%d", i), TCPAddress: fmt.Sprintf("b%d:4150", i), HTTPAddress: fmt.Sprintf("b%d:4151", i), Mcap: 1 << 40,
				}, nil)
			}
			for i := range topics {
				s := &catalog.Spec{
					Demand: placement.Demand{
						Topic: fmt.Sprintf("topic-%05d", i), Rate: 10, RateMilli: 10_000, Burst: 10,
						Groups: []placement.Group{{Key: "g", Count: 10, Rate: 1}},
					},
					SLO: catalog.SLO{Quantile: 0.99, Latency: time.Millisecond}, Policy: placement.LoadBalance, Channels: []string{"c"},
				}
				plan := testkit.Result(placement.Place(s.Policy, cat.Snapshot(""), s.Demand, rng)).Must(b)
				must(catalog.NewTopicPlaced(s, plan, ""))
				for _, q := range plan.Quotas {
					must(catalog.MemberPrepared{Topic: s.Name(), Broker: q.Broker}, nil)
				}
				must(catalog.TopicActivated{Topic: s.Name()}, nil)
			}
			control, err := controller.New(controller.Config{
				ReportInterval: time.Second, PrepareTimeout: time.Second, Window: time.Minute, Catalog: cat, Log: slog.New(slog.DiscardHandler),
			}, nil)
			testkit.Must(b, err)
			mux := http.NewServeMux()
			lookup.Mount(mux, lookup.NewDirectory(control.View(), registry.Config{InactiveAfter: time.Minute, TombstoneFor: time.Minute}), "1", nil)
			request := httptest.NewRequest(http.MethodGet, "/lookup?topic=topic-00007", nil)
			b.ReportAllocs()
			for b.Loop() {
				w := httptest.NewRecorder()
				if mux.ServeHTTP(w, request); w.Code != http.StatusOK {
					b.Fatal(w.Code, w.Body)
				}
			}
		})
	}
}
