package loop

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/tokenbucket"
)

// maxListed bounds the topics with series, by name, as in the loaddistributor. It also bounds the
// idle-share series of all topics, which an alert uses.
const maxListed = 500

var (
	descUnlisted = desc("topics_without_series", "Topics beyond the bound on series per topic.")
	descRate     = desc("share_rate", "Rate that the topic's contract has granted to the broker, in messages per second.", "topic", "broker")
	descBurst    = desc("share_burst", "Burst that the topic's contract has granted to the broker, in messages.", "topic", "broker")
	descReserved = desc("share_idle_rate", "Rate reserved for a broker whose lease is over, and which may be dead, in messages per second.", "topic", "broker")
	descParts    = desc("contract_rate", "Rate of the topic's contract, in messages per second: held by brokers that are connected (part live), reserved for brokers that are not (away), and free, or on its way from one to another.", "topic", "part")
	descPool     = desc("pool_tokens", "Tokens that wait for a share to grow.", "topic")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("srtm_tbadaptor_"+name, help, labels, nil)
}

// collector exports the state of the ledger at the time of a scrape.
type collector struct{ s *Server }

func (c collector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

func (c collector) Collect(ch chan<- prometheus.Metric) {
	c.s.mu.Lock()
	views := c.s.mu.machine.Ledger.View()
	c.s.mu.Unlock()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	gauge(descUnlisted, float64(max(0, len(views)-maxListed)))
	idle := 0
	for i, v := range views {
		for _, m := range v.Members {
			if m.Lapsed && idle < maxListed {
				gauge(descReserved, m.Reserved.Rate.PerSecond(), v.Topic, m.Broker)
				idle++
			}
		}
		if i >= maxListed {
			continue
		}
		gauge(descPool, float64(v.Pool)/1000, v.Topic)
		var live, disconnected tokenbucket.Rate
		for _, m := range v.Members {
			gauge(descRate, m.Acknowledged.Rate.PerSecond(), v.Topic, m.Broker)
			gauge(descBurst, float64(m.Acknowledged.Burst), v.Topic, m.Broker)
			if m.Connected {
				live += m.Acknowledged.Rate
			} else {
				disconnected += m.Reserved.Rate
			}
		}
		gauge(descParts, live.PerSecond(), v.Topic, "live")
		gauge(descParts, disconnected.PerSecond(), v.Topic, "away")
		gauge(descParts, max(0, v.Contract.Rate-live-disconnected).PerSecond(), v.Topic, "free")
	}
}
