package proxy

import "github.com/prometheus/client_golang/prometheus"

var (
	requests       = prometheus.NewDesc("srtm_gateway_requests_total", "Requests of a class, by what became of them: sent to a server, refused (full, late, admission), or left by their clients in the queue.", []string{"class", "result"}, nil)
	queued         = prometheus.NewDesc("srtm_gateway_queued", "Requests of a class that wait.", []string{"class"}, nil)
	inFlight       = prometheus.NewDesc("srtm_gateway_in_flight", "Requests of a class that are at servers.", []string{"class"}, nil)
	waits          = prometheus.NewDesc("srtm_gateway_queue_seconds", "How long requests of a class waited before they were sent.", []string{"class"}, nil)
	used           = prometheus.NewDesc("srtm_gateway_used_ratio_total", "What a class was charged of a resource, as a ratio of the largest server's, summed over requests.", []string{"class", "resource"}, nil)
	estimate       = prometheus.NewDesc("srtm_gateway_estimated_ratio_total", "What a class would have been charged of a resource by estimates alone; beside used_ratio_total it says how good they are.", []string{"class", "resource"}, nil)
	deficit        = prometheus.NewDesc("srtm_gateway_deficit_ratio", "What a class may take of a resource before the next quanta are granted, as a ratio of the largest server's; below 0 it is in debt.", []string{"class", "resource"}, nil)
	serverRequests = prometheus.NewDesc("srtm_gateway_server_requests_total", "Requests that were sent to a server and have ended: answered, failed by the server, or aborted by the client.", []string{"server", "result"}, nil)
	resent         = prometheus.NewDesc("srtm_gateway_server_resent_total", "Times that a request was sent to a server again, since it had ended a kept connection without an answer.", []string{"server"}, nil)
	atServer       = prometheus.NewDesc("srtm_gateway_server_in_flight", "Requests that are at a server: this gateway's, and those that the server has of others.", []string{"server", "of"}, nil)
	limited        = prometheus.NewDesc("srtm_gateway_server_limit", "Requests that a server may have in flight: what keeps it busy, and a few more.", []string{"server"}, nil)
	interval       = prometheus.NewDesc("srtm_gateway_server_departure_seconds", "Mean time between two answers of a server while it is busy.", []string{"server"}, nil)
	expected       = prometheus.NewDesc("srtm_gateway_server_answer_seconds", "When a server is expected to answer one more request.", []string{"server"}, nil)
	ejected        = prometheus.NewDesc("srtm_gateway_server_ejected", "1 while a server gets no request, since it failed 5 in a row.", []string{"server"}, nil)
	free           = prometheus.NewDesc("srtm_gateway_server_free_ratio", "What is free of a resource of a server, as a ratio of the largest server's.", []string{"server", "resource"}, nil)
	clients        = prometheus.NewDesc("srtm_gateway_connections", "Open connections of clients.", nil, nil)
	noSlot         = prometheus.NewDesc("srtm_gateway_connections_refused_total", "Connections of clients refused at the limit.", nil, nil)
	badReports     = prometheus.NewDesc("srtm_gateway_bad_reports_total", "Load reports of servers that could not be read.", nil, nil)
)

// Describe implements prometheus.Collector. It describes no metrics, because they depend on the policy.
func (p *Proxy) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (p *Proxy) Collect(metrics chan<- prometheus.Metric) {
	const counter, gauge = prometheus.CounterValue, prometheus.GaugeValue
	add := func(desc *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(desc, kind, v, labels...)
	}
	s := p.Status()
	for _, c := range s.Classes {
		for result, v := range map[string]uint64{"sent": c.Sent, "full": c.Full, "late": c.Late, "admission": c.Denied, "left": c.Left} {
			add(requests, counter, float64(v), c.Name, result)
		}
		add(queued, gauge, float64(c.Queued), c.Name)
		add(inFlight, gauge, float64(c.InFlight), c.Name)
		metrics <- c.waited
		for k, name := range s.Resources {
			add(used, counter, c.ClassStats.Used[k]/100, c.Name, name)
			add(estimate, counter, c.Estimated[k]/100, c.Name, name)
			add(deficit, gauge, c.ClassStats.Deficit[k]/100, c.Name, name)
		}
	}
	for _, b := range s.Servers {
		for result, v := range map[string]uint64{"answered": b.Departed, "failed": b.Failed, "aborted": b.Aborted} {
			add(serverRequests, counter, float64(v), b.URL, result)
		}
		add(resent, counter, float64(b.Resent), b.URL)
		add(atServer, gauge, float64(b.InFlight), b.URL, "own")
		add(atServer, gauge, float64(b.Others), b.URL, "others")
		add(limited, gauge, float64(b.Limit), b.URL)
		add(interval, gauge, b.Interval.Seconds(), b.URL)
		add(expected, gauge, b.Answer.Seconds(), b.URL)
		add(ejected, gauge, map[bool]float64{true: 1}[b.Ejected], b.URL)
		for name, percent := range b.Free {
			add(free, gauge, percent/100, b.URL, name)
		}
	}
	add(clients, gauge, float64(p.slots.Open()))
	add(noSlot, counter, float64(p.slots.Refused()))
	add(badReports, counter, float64(s.badReports))
}
