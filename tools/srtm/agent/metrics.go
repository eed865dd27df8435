package agent

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/srtm-io/srtm/client/pool"
)

type metrics struct {
	turnedAway prometheus.Counter
	publishes  *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer, connections, publishers func() int) metrics {
	auto := promauto.With(r)
	gauge := func(name, help string, n func() int) {
		auto.NewGaugeFunc(prometheus.GaugeOpts{Name: "srtm_publish_agent_" + name, Help: help}, func() float64 { return float64(n()) })
	}
	gauge("connections", "Producers that are connected.", connections)
	gauge("publishers", "Publishers in use: topics and ids.", publishers)
	m := metrics{
		turnedAway: auto.NewCounter(prometheus.CounterOpts{
			Name: "srtm_publish_agent_connections_refused_total", Help: "Producers refused since there were too many.",
		}),
		publishes: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "srtm_publish_agent_publishes_total",
			Help: "Publishes by what became of them: accepted by a broker; refused by it; unanswered, so that it may have accepted them; unsent.",
		}, []string{"result"}),
	}
	for _, result := range pool.Results {
		m.publishes.WithLabelValues(result) // show 0, too
	}
	return m
}
