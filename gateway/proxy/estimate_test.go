package proxy

import (
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/testkit"
)

// The estimated cost is reported beside the measured cost.
func TestEstimateBesideMeasured(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Endpoint-Load-Metrics", "TEXT request_cost.cpu=40")
	})
	metrics := prometheus.NewRegistry()
	g := serve(t, several(url), func(c *Config) { c.Metrics = metrics })
	g.get(t, "/")
	g.idle(t)
	testkit.Equal(t, testkit.Metric(t, metrics, "srtm_gateway_estimated_ratio_total"), 0.1, "estimated")
	testkit.Equal(t, testkit.Metric(t, metrics, "srtm_gateway_used_ratio_total"), 0.2, "used")
}
