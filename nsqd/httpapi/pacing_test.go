package httpapi_test

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/kernel/hook"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/httpapi"
	"github.com/srtm-io/srtm/tokenbucket"
)

// An HTTP publisher gets its permitted rate in response headers, and /stats and the metrics show the rate.
func TestPacingOverHTTP(t *testing.T) {
	sc, log := session.DefaultConfig(), slog.New(slog.DiscardHandler)
	b, err := broker.New(broker.Config{Capacity: 10_000_000, MaxMsgTimeout: time.Minute, AutoCreate: true, Pacing: broker.PacePolice})
	testkit.Must(t, err)
	t.Cleanup(func() { b.Close() })
	stamps := testkit.Result(hook.Open(hook.Off, hook.Config{}, log)).Must(t)
	conns := testkit.Result(conn.New(conn.Config{Session: &sc, WriteTimeout: testkit.Hang}, b, stamps, log)).Must(t)
	registry := prometheus.NewRegistry()
	api := httpapi.New(httpapi.Config{Session: &sc}, b, conns, stamps, registry, log)
	ask := func(method, path, body string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(method, "http://127.0.0.1:4151"+path, strings.NewReader(body))
		r.RemoteAddr = "192.0.2.7:1234"
		api.ServeHTTP(w, r)
		return w
	}
	top, err := b.CreateTopic("t")
	testkit.Must(t, err)
	testkit.Must(t, top.CreateChannel("c"))
	top.Contract(tokenbucket.Share{Rate: tokenbucket.PerSecond(100), Burst: 1}, false)
	if h := ask("POST", "/pub?topic=t", "x").Header(); h.Get("RateLimit") != "" {
		t.Errorf("headers where no publisher is paced: %v", h)
	}
	var w *httptest.ResponseRecorder
	testkit.WaitFor(t, "a refusal", func() bool {
		w = ask("POST", "/mpub?topic=t", strings.Repeat("x\n", 10))
		return w.Code != http.StatusOK
	})
	if w.Code != http.StatusTooManyRequests || !strings.HasPrefix(w.Header().Get("RateLimit"), `"pace";r=`) || !strings.HasPrefix(w.Header().Get("RateLimit-Policy"), `"pace";q=`) {
		t.Errorf("%d %v", w.Code, w.Header())
	}
	var stats struct {
		Topics []struct {
			Pacing struct {
				Mode       string
				Paced      bool
				Rate       float64
				SumWeights float64 `json:"sum_weights"`
				Refused    uint64
				Publishers []struct {
					Kind, ID           string
					Rate, Weight, Told float64
				}
			}
		}
	}
	if err := json.Unmarshal(ask("GET", "/stats?format=json", "").Body.Bytes(), &stats); err != nil || len(stats.Topics) != 1 {
		t.Fatal(err, stats)
	}
	p := stats.Topics[0].Pacing
	if p.Mode != "police" || !p.Paced || p.Rate <= 0 || p.SumWeights <= 0 || p.Refused == 0 || len(p.Publishers) != 1 {
		t.Errorf("%+v", p)
	} else if one := p.Publishers[0]; one.Kind != "addr" || one.ID != "192.0.2.7" || one.Weight != 1 || one.Told != p.Rate || one.Rate <= 0 {
		t.Errorf("%+v", one)
	}
	families := testkit.Result(registry.Gather()).Must(t)
	found := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			if strings.HasPrefix(f.GetName(), "srtm_pacing_") {
				found[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	if len(found) != 5 || found["srtm_pacing_paced"] != 1 || found["srtm_pacing_refused_total"] != float64(p.Refused) {
		t.Errorf("%v", found)
	}
}
