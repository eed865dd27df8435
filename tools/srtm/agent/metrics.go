package agent

import "github.com/prometheus/client_golang/prometheus"

var (
	descConns      = prometheus.NewDesc("srtm_publish_agent_connections", "Producers that are connected.", nil, nil)
	descPublishers = prometheus.NewDesc("srtm_publish_agent_publishers", "Publishers in use: topics and ids.", nil, nil)
	descTurnedAway = prometheus.NewDesc("srtm_publish_agent_connections_refused_total", "Producers refused since there were too many.", nil, nil)
	descPublishes  = prometheus.NewDesc("srtm_publish_agent_publishes_total",
		"Publishes by what became of them: accepted by a broker; refused by it; unanswered, so that it may have accepted them; unsent.", []string{"result"}, nil)
)

// collector has the metrics.
type collector struct{ a *Agent }

func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descConns, descPublishers, descTurnedAway, descPublishes} {
		ch <- d
	}
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	a := c.a
	a.mu.Lock()
	conns := len(a.mu.conns)
	a.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(descConns, prometheus.GaugeValue, float64(conns))
	ch <- prometheus.MustNewConstMetric(descPublishers, prometheus.GaugeValue, float64(a.publishers.Len()))
	ch <- prometheus.MustNewConstMetric(descTurnedAway, prometheus.CounterValue, float64(a.turnedAway.Load()))
	for result, n := range map[string]uint64{
		"accepted": a.accepted.Load(), "refused": a.refused.Load(), "unanswered": a.unanswered.Load(), "unsent": a.unsent.Load(),
	} {
		ch <- prometheus.MustNewConstMetric(descPublishes, prometheus.CounterValue, float64(n), result)
	}
}
