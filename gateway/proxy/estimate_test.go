package proxy

import (
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/testkit"
)

// What was estimated stands beside what was measured.
func TestEstimateBesideMeasured(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Endpoint-Load-Metrics", "TEXT request_cost.cpu=40")
	})
	metrics := prometheus.NewRegistry()
	g := serve(t, several(url), func(c *Config) { c.Metrics = metrics })
	g.get(t, "/")
	g.idle(t)
	families, err := metrics.Gather()
	testkit.Must(t, err)
	got := map[string]float64{}
	for _, f := range families {
		got[f.GetName()] = f.Metric[0].GetCounter().GetValue()
	}
	if e, u := got["srtm_gateway_estimated_ratio_total"], got["srtm_gateway_used_ratio_total"]; e != 0.1 || u != 0.2 {
		t.Errorf("estimated %v, used %v: want 0.1, 0.2", e, u)
	}
}
