package proxy

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/connlimit"
)

// collector reads the dispatcher, and how many clients there are, when it is asked.
type collector struct {
	dispatcher *dispatcher
	slots      *connlimit.Slots
}

var (
	requests = prometheus.NewDesc("srtm_gateway_requests_total", "Requests of a class, by what became of them: sent to a server, refused (full, late, admission), or left by their clients in the queue.", []string{"class", "result"}, nil)
	queued   = prometheus.NewDesc("srtm_gateway_queued", "Requests of a class that wait.", []string{"class"}, nil)
	inFlight = prometheus.NewDesc("srtm_gateway_in_flight", "Requests of a class that are at servers.", []string{"class"}, nil)
	waits    = prometheus.NewDesc("srtm_gateway_queue_seconds", "How long requests of a class waited before they were sent.", []string{"class"}, nil)
	used     = prometheus.NewDesc("srtm_gateway_used_ratio_total", "What a class was charged of a resource, as a ratio of the greatest server's, summed over requests.", []string{"class", "resource"}, nil)
	estimate = prometheus.NewDesc("srtm_gateway_estimated_ratio_total", "What a class would have been charged of a resource by estimates alone; beside used_ratio_total it says how good they are.", []string{"class", "resource"}, nil)
	deficit  = prometheus.NewDesc("srtm_gateway_deficit_ratio", "What a class may take of a resource before the next quanta are granted, as a ratio of the greatest server's; below 0 it is in debt.", []string{"class", "resource"}, nil)
	ended    = prometheus.NewDesc("srtm_gateway_server_requests_total", "Requests that were sent to a server and have ended: answered, failed by the server, or aborted by the client.", []string{"server", "result"}, nil)
	atServer = prometheus.NewDesc("srtm_gateway_server_in_flight", "Requests that are at a server: this gateway's, and those that the server has of others.", []string{"server", "of"}, nil)
	interval = prometheus.NewDesc("srtm_gateway_server_departure_seconds", "Mean time between two answers of a server while it is busy.", []string{"server"}, nil)
	expected = prometheus.NewDesc("srtm_gateway_server_answer_seconds", "When a server is expected to answer one more request.", []string{"server"}, nil)
	ejected  = prometheus.NewDesc("srtm_gateway_server_ejected", "1 while a server gets no request, since it failed 5 in a row.", []string{"server"}, nil)
	free     = prometheus.NewDesc("srtm_gateway_server_free_ratio", "What is free of a resource of a server, as a ratio of the greatest server's.", []string{"server", "resource"}, nil)
	clients  = prometheus.NewDesc("srtm_gateway_connections", "Open connections of clients.", nil, nil)
	noSlot   = prometheus.NewDesc("srtm_gateway_connections_refused_total", "Connections of clients refused: there are as many as there may be.", nil, nil)
	bad      = prometheus.NewDesc("srtm_gateway_bad_reports_total", "Load reports of servers that could not be read.", nil, nil)
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{requests, queued, inFlight, waits, used, estimate, deficit, ended, atServer, interval, expected, ejected, free, clients, noSlot, bad} {
		descs <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(metrics chan<- prometheus.Metric) {
	var all []prometheus.Metric // sent without the lock
	add := func(desc *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		all = append(all, prometheus.MustNewConstMetric(desc, kind, v, labels...))
	}
	const counter, gauge = prometheus.CounterValue, prometheus.GaugeValue
	d := c.dispatcher
	d.mu.Lock()
	m := &d.mu
	state, names := m.schedule.Stats(), m.cost.Resources()
	for i, c := range state.Classes {
		n := &m.classes[i]
		for result, v := range map[string]uint64{"sent": n.base + c.Sent, "full": n.full, "late": n.late, "admission": n.denied, "left": n.left} {
			add(requests, counter, float64(v), c.Name, result)
		}
		add(queued, gauge, float64(c.Queued), c.Name)
		add(inFlight, gauge, float64(c.InFlight), c.Name)
		all = append(all, n.waits.Metric(waits, c.Name))
		for k, name := range names {
			add(used, counter, c.Used[k]/100, c.Name, name)
			add(estimate, counter, c.Estimated[k]/100, c.Name, name)
			add(deficit, gauge, c.Deficit[k]/100, c.Name, name)
		}
	}
	for _, b := range m.balance.Stats(clock.Mono(), nil) {
		at := m.servers[b.Server].name
		for result, v := range map[string]uint64{"answered": b.Departed, "failed": b.Failed, "aborted": b.Aborted} {
			add(ended, counter, float64(v), at, result)
		}
		add(atServer, gauge, float64(b.InFlight), at, "own")
		add(atServer, gauge, float64(b.Others), at, "others")
		add(interval, gauge, b.Interval.Seconds(), at)
		add(expected, gauge, b.Answer.Seconds(), at)
		out := 0.0
		if b.Ejected {
			out = 1
		}
		add(ejected, gauge, out, at)
		for k, name := range names {
			add(free, gauge, state.Servers[b.Server].Free[k]/100, at, name)
		}
	}
	add(clients, gauge, float64(c.slots.Open()))
	add(noSlot, counter, float64(c.slots.Refused()))
	add(bad, counter, float64(m.badReports))
	d.mu.Unlock()
	for _, metric := range all {
		metrics <- metric
	}
}
