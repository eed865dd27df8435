package obs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/pprof"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/srtm-io/srtm/internal/program"
)

// NewRegistry returns a registry with the metrics of the Go runtime and the process,
// srtm_build_info and srtm_log_lines_dropped_total. srtm_build_info is a constant 1
// labelled with the release, the commit and the Go version. The latter metric counts the
// dropped lines of Stderr.
func NewRegistry() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "srtm_build_info",
		Help: "Constant 1, labelled with what was built.",
		ConstLabels: prometheus.Labels{
			"version": program.Release, "commit": program.Commit(), "go_version": runtime.Version(),
		},
	})
	build.Set(1)
	dropped := prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "srtm_log_lines_dropped_total",
		Help: "Log lines that were not written: they came faster than standard error was read, or writing failed.",
	}, func() float64 { return float64(Stderr.Dropped()) })
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), build, dropped)
	return reg
}

// Mount adds the common routes to mux:
//   - /metrics from reg and /debug/pprof/.
//   - /debug/state with state() as JSON. A nil state leaves the route out.
//   - /healthz, with 200 "ok", or 503 and the error of health(). A Notice gives 200 "ok"
//     with an additional line. A nil health is always healthy.
//
// Mount's handlers call state and health once per request, from many goroutines.
//
// Profiles and state are for operators: bind the mux to loopback by default.
func Mount(mux *http.ServeMux, reg *prometheus.Registry, state func() any, health func() error) {
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{Registry: reg}))

	// Importing net/http/pprof also registers on http.DefaultServeMux, which no server of
	// ours uses (a rule of internal/archtest).
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)

	if state != nil {
		mux.Handle("GET /debug/state", JSON(func() (any, error) { return state(), nil }))
	}
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		text := "ok\n"
		if health != nil {
			err := health()
			notice, healthy := errors.AsType[Notice](err)
			switch {
			case healthy:
				text += string(notice) + "\n"
			case err != nil:
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte(text))
	})
}

// Notice is a warning in /healthz of a healthy daemon that will become unhealthy if a
// condition persists.
type Notice string

func (n Notice) Error() string { return string(n) }

// JSON answers with state() as JSON, or 503 with its error.
func JSON(state func() (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		v, err := state()
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		var body bytes.Buffer
		encoder := json.NewEncoder(&body)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(v); err != nil {
			http.Error(w, fmt.Sprintf("encode state: %v", err), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body.Bytes()) // the client has left
	})
}
