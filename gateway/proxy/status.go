package proxy

import (
	"errors"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/gateway/balance"
	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/obs"
)

// Status is the answer of /status. Tools may rely on each field.
type Status struct {
	Balance   string         `json:"balance"`
	Scheduler string         `json:"scheduler"`
	Resources []string       `json:"resources"`
	Classes   []ClassStatus  `json:"classes"`
	Servers   []ServerStatus `json:"servers"`

	badReports uint64
}

// ClassStatus is the state of a class. Percentages refer to a server of 100 percent.
type ClassStatus struct {
	schedule.ClassStats
	counts
	Weight    int                `json:"weight"`
	Used      map[string]float64 `json:"used"`    // percent of a resource, summed over requests
	Deficit   map[string]float64 `json:"deficit"` // percent that the class may take before the next grant
	WaitMsP50 float64            `json:"wait_ms_p50"`
	WaitMsP99 float64            `json:"wait_ms_p99"`

	waited prometheus.Metric
}

// ServerStatus is the state of a server.
type ServerStatus struct {
	URL string `json:"url"`
	balance.Stat
	Limit           int                `json:"limit"`             // maximum requests in flight now
	MeanDepartureMs float64            `json:"mean_departure_ms"` // T
	AnswerMs        float64            `json:"answer_ms"`         // (1+Q)*T
	Capacity        map[string]float64 `json:"capacity"`
	Free            map[string]float64 `json:"free"`
	Resent          uint64             `json:"resent"` // repeated sends
}

// Status returns the present state.
func (p *Proxy) Status() Status {
	d := p.dispatcher
	d.mu.Lock()
	defer d.mu.Unlock()
	m := &d.mu
	s := Status{Balance: d.cfg.Balance.String(), Scheduler: d.cfg.Scheduler, Resources: m.cost.Resources(), badReports: m.badReports}
	byName := func(v []float64) map[string]float64 {
		named := map[string]float64{}
		for k, name := range s.Resources {
			named[name] = v[k]
		}
		return named
	}
	for i, c := range m.schedule.Classes() {
		n := m.classes[i]
		s.Classes = append(s.Classes, ClassStatus{
			ClassStats: c, counts: n, Weight: m.policy.Classes[i].Weight, Used: byName(c.Used), Deficit: byName(c.Deficit),
			WaitMsP50: ms(n.waits.Quantile(0.5)), WaitMsP99: ms(n.waits.Quantile(0.99)), waited: obs.LatencyMetric(n.waits, waits, c.Name),
		})
	}
	for _, b := range m.balance.Stats(clock.Mono(), nil) {
		v := m.schedule.Server(b.Server)
		s.Servers = append(s.Servers, ServerStatus{
			URL: m.servers[b.Server].URL, Stat: b, Limit: m.servers[b.Server].limit.Most(), MeanDepartureMs: ms(b.Interval), AnswerMs: ms(b.Answer), Capacity: byName(v.Capacity), Free: byName(v.Free), Resent: m.servers[b.Server].resent,
		})
	}
	return s
}

func ms(d time.Duration) float64 { return d.Seconds() * 1e3 }

// Healthy returns an error if every server is ejected.
func (p *Proxy) Healthy() error {
	servers := p.Status().Servers
	if len(servers) > 0 && !slices.ContainsFunc(servers, func(s ServerStatus) bool { return !s.Ejected }) {
		return errors.New("every server is ejected")
	}
	return nil // a gateway without servers only publishes
}
