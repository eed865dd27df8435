package proxy

import (
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
)

// Status is what /status answers: the contract with tools, which may rely on each field.
type Status struct {
	Balance   string         `json:"balance"`
	Scheduler string         `json:"scheduler"`
	Resources []string       `json:"resources"`
	Classes   []ClassStatus  `json:"classes"`
	Servers   []ServerStatus `json:"servers"`
}

// ClassStatus is that of a class. Percentages are of a server of 100 percent.
type ClassStatus struct {
	Name      string             `json:"name"`
	Weight    int                `json:"weight"`
	Queued    int                `json:"queued"`
	InFlight  int                `json:"in_flight"`
	Sent      uint64             `json:"sent"`
	Used      map[string]float64 `json:"used"`    // percent of a resource, summed over requests
	Deficit   map[string]float64 `json:"deficit"` // percent that it may take before more is granted
	Full      uint64             `json:"refused_full"`
	Late      uint64             `json:"refused_late"`
	Denied    uint64             `json:"refused_admission"`
	Left      uint64             `json:"left"` // clients that did not wait for their turn
	WaitMsP50 float64            `json:"wait_ms_p50"`
	WaitMsP99 float64            `json:"wait_ms_p99"`
}

// ServerStatus is that of a server.
type ServerStatus struct {
	URL             string             `json:"url"`
	InFlight        int                `json:"in_flight"`
	Elsewhere       int                `json:"in_flight_elsewhere"` // of other gateways
	Sent            uint64             `json:"sent"`
	Departed        uint64             `json:"departed"`
	Failed          uint64             `json:"failed"`
	Aborted         uint64             `json:"aborted"`
	MeanDepartureMs float64            `json:"mean_departure_ms"` // T
	AnswerMs        float64            `json:"answer_ms"`         // (1+Q)*T
	Ejected         bool               `json:"ejected"`
	Capacity        map[string]float64 `json:"capacity"`
	Free            map[string]float64 `json:"free"`
}

// Status returns the state, as of now.
func (p *Proxy) Status() Status {
	d := p.dispatcher
	d.mu.Lock()
	defer d.mu.Unlock()
	m := &d.mu
	s := Status{Balance: d.cfg.Balance.String(), Scheduler: d.cfg.Scheduler, Resources: m.cost.Resources()}
	byName := func(v []float64) map[string]float64 {
		named := map[string]float64{}
		for k, name := range m.cost.Resources() {
			named[name] = v[k]
		}
		return named
	}
	stats := m.schedule.Stats()
	for i, c := range stats.Classes {
		n := &m.classes[i]
		s.Classes = append(s.Classes, ClassStatus{
			Name: c.Name, Weight: m.policy.Classes[i].Weight, Queued: c.Queued, InFlight: c.InFlight, Sent: n.base + c.Sent,
			Used: byName(c.Used), Deficit: byName(c.Deficit), Full: n.full, Late: n.late, Denied: n.denied, Left: n.left,
			WaitMsP50: ms(n.waits.Quantile(0.5)), WaitMsP99: ms(n.waits.Quantile(0.99)),
		})
	}
	for _, b := range m.balance.Stats(clock.Mono(), nil) {
		v := stats.Servers[b.Server]
		s.Servers = append(s.Servers, ServerStatus{
			URL: m.servers[b.Server].name, InFlight: b.InFlight, Elsewhere: b.Others, Sent: b.Sent, Departed: b.Departed, Failed: b.Failed, Aborted: b.Aborted,
			MeanDepartureMs: ms(b.Interval), AnswerMs: ms(b.Answer), Ejected: b.Ejected, Capacity: byName(v.Capacity), Free: byName(v.Free),
		})
	}
	return s
}

func ms(d time.Duration) float64 { return d.Seconds() * 1e3 }

// State is Status for /debug/state.
func (p *Proxy) State() any { return p.Status() }

// ServeStatus answers with the Status as JSON.
func (p *Proxy) ServeStatus(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(p.Status()) // the client is gone; no one is left to tell
}

var errAllEjected = errors.New("every server is ejected")

// Healthy is an error while no server answers.
func (p *Proxy) Healthy() error {
	servers := p.Status().Servers
	for _, s := range servers {
		if !s.Ejected {
			return nil
		}
	}
	if len(servers) == 0 {
		return nil // it only publishes
	}
	return errAllEjected
}
