package daemon

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
)

// Addresses are the listeners of a control plane daemon, with their clients' security.
type Addresses struct {
	GRPC, HTTP string
	Guard      *secure.Server // set by Validate
	// Kept keeps the listeners of one Serve open until the next Serve, and new connections
	// wait in the meantime. Its owner closes it. nil: the listeners close with Serve.
	Kept     lifecycle.Listeners
	security secure.ServerConfig
	traces   string // an endpoint; "": no traces
}

// Groups returns the flags of the listeners and of security. forGRPC and forHTTP describe
// the listeners in --help. others are the flags of the daemon's other listeners.
func (a *Addresses) Groups(forGRPC, forHTTP string, others ...string) []Group {
	return []Group{
		{Listen, func(fs *flag.FlagSet) {
			fs.StringVar(&a.GRPC, "grpc-address", a.GRPC, "`host:port` for gRPC: "+forGRPC)
			fs.StringVar(&a.HTTP, "http-address", a.HTTP, "`host:port` for HTTP: "+forHTTP)
			fs.StringVar(&a.traces, "trace-endpoint", "", "`URL` of an OpenTelemetry collector's OTLP/gRPC port, http://host:4317 or https://...: trace gRPC calls (default none)")
		}},
		{Security, func(fs *flag.FlagSet) {
			a.security.Flags(fs, append([]string{"grpc-address", "http-address"}, others...)...)
		}},
	}
}

// Validate reads the security files and returns all problems.
func (a *Addresses) Validate() error {
	var err error
	a.Guard, err = a.security.Load()
	return errors.Join(err, checkTraces(a.traces), a.security.CheckGRPC("--grpc-address", a.GRPC), a.security.CheckHTTP("--http-address", a.HTTP))
}

// Check refuses an unsafe address of another listener; see secure.ServerConfig.Check.
func (a *Addresses) Check(flag, address string, safe bool, want string) error {
	return a.security.Check(flag, address, safe, want)
}

// CheckPlain refuses an unsafe address of another listener without TLS and tokens.
func (a *Addresses) CheckPlain(flag, address string) error {
	return a.security.CheckPlain(flag, address)
}

// Servers are the gRPC and HTTP servers of a daemon under construction.
type Servers struct {
	GRPC *grpc.Server
	Mux  *http.ServeMux
	HTTP *http.Server // serves Mux
	Open []string     // paths of Mux served without a token
	// Pages serves paths below PagesAt instead of Mux, and checks tokens itself.
	Pages   http.Handler
	PagesAt string
	Metrics *prometheus.Registry
	Traces  trace.TracerProvider // nil: no spans
	Group   lifecycle.Group      // build adds parts, and AddServers among them

	AddServers func()

	RPCListener, WebListener net.Listener

	// Health is served by GRPC. While the group runs, all services are healthy. If Watch
	// is set, Watch reports the health instead, until its context ends.
	Health *health.Server
	Watch  func(context.Context)
	Up     []any // further attributes of the startup log line
}

// Serve opens the listeners, lets build add services and parts, and runs everything until
// ctx ends. options extend the options of all our gRPC servers.
func (a *Addresses) Serve(ctx context.Context, name string, log *slog.Logger, options []grpc.ServerOption, build func(*Servers) error) error {
	a.Guard.Log(log)
	var provider trace.TracerProvider
	if a.traces != "" {
		tracing, traceProvider, end, err := traces(ctx, a.traces, name, log)
		if err != nil {
			return err
		}
		defer end()
		provider = traceProvider
		options = append(options, tracing)
	}
	s := &Servers{
		GRPC: grpc.NewServer(slices.Concat(service.ServerOptions(), options, a.Guard.Options())...), Mux: http.NewServeMux(), HTTP: lifecycle.HTTP(nil, log),
		Metrics: obs.NewRegistry(), Traces: provider, Health: health.NewServer(),
	}
	var err error
	if s.RPCListener, err = a.Kept.Listen("--grpc-address", a.GRPC); err != nil {
		return err
	}
	if s.WebListener, err = a.Kept.Listen("--http-address", a.HTTP); err != nil {
		return errors.Join(err, s.RPCListener.Close())
	}
	s.Watch = s.serving
	a.Guard.Measure(s.Metrics)
	// Half each, so the clients of one listener do not exclude the other's.
	descriptors := bounded.Descriptors()
	web := &bounded.Listener{Listener: s.WebListener, Slots: &bounded.Slots{Most: bounded.Part(descriptors, 2, 50_000)}, Plain: !a.Guard.HTTPTLS()}
	rpc := &bounded.Listener{Listener: s.RPCListener, Slots: &bounded.Slots{Most: bounded.Part(descriptors, 2, math.MaxInt32), EvictUnauthenticated: a.Guard.Identifies()}}
	count := func(name, help string, n func() uint64) {
		s.Metrics.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "srtm_" + name, Help: help}, func() float64 { return float64(n()) }))
	}
	count("http_connections_refused_total", "Connections to --http-address closed at once, because the connection limit was reached.", web.Slots.Refused)
	count("grpc_connections_refused_total", "Connections to --grpc-address closed at once, because the connection limit was reached.", rpc.Slots.Refused)
	count("grpc_connections_evicted_total", "Unauthenticated connections to --grpc-address closed for newer connections, because the connection limit was reached.", rpc.Slots.Evicted)
	s.AddServers = func() {
		s.Group.Add("http", lifecycle.Serve(a.Guard.Listener(web), s.HTTP))
		s.Group.Add("grpc", lifecycle.ServeGRPC(rpc, s.GRPC))
	}
	healthv1.RegisterHealthServer(s.GRPC, s.Health)
	if err := build(s); err != nil {
		return errors.Join(err, s.RPCListener.Close(), s.WebListener.Close())
	}
	reflection.Register(s.GRPC)
	s.watched(healthv1.HealthCheckResponse_NOT_SERVING)
	s.HTTP.Handler = WithPages(a.Guard.Handler(s.Mux, s.Open...), s.Pages, s.PagesAt)
	s.Group.Add("health", func(ctx context.Context) error {
		s.Watch(ctx)
		s.Health.Shutdown()
		return nil
	})
	log.Info(name+" is up", append([]any{obs.KeyVersion, program.Version(), "grpc", s.RPCListener.Addr().String(), "http", s.WebListener.Addr().String()}, s.Up...)...)
	err = s.Group.Run(ctx)
	log.Info(name + " is down")
	return err
}

// WithPages serves paths below at with pages, and all other paths with next. nil pages:
// only next.
func WithPages(next, pages http.Handler, path string) http.Handler {
	if pages == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasPrefix(r.URL.Path, path):
			pages.ServeHTTP(w, r)
		case r.URL.Path == "/" && strings.Contains(r.Header.Get("Accept"), "text/html"): // a browser
			http.Redirect(w, r, path, http.StatusFound)
		case r.URL.Path+"/" == path:
			http.Redirect(w, r, path, http.StatusMovedPermanently)
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// serving reports all services as healthy.
func (s *Servers) serving(ctx context.Context) {
	s.watched(healthv1.HealthCheckResponse_SERVING)
	<-ctx.Done()
}

func (s *Servers) watched(status healthv1.HealthCheckResponse_ServingStatus) {
	s.Health.SetServingStatus("", status) // the server as a whole
	for name := range s.GRPC.GetServiceInfo() {
		s.Health.SetServingStatus(name, status)
	}
}

// maxOperators bounds the connections at an operators' address. Further connections
// receive 503.
const maxOperators = 256

// ListenHTTP listens for operators at a flag's address. It returns the address and a part
// that serves handler to clients that the guard admits.
func ListenHTTP(flag, address string, guard *secure.Server, handler http.Handler, log *slog.Logger) (net.Addr, func(context.Context) error, error) {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", flag, err)
	}
	limited := &bounded.Listener{Listener: ln, Slots: &bounded.Slots{Most: maxOperators}, Plain: !guard.HTTPTLS()}
	return ln.Addr(), lifecycle.Serve(guard.Listener(limited), lifecycle.HTTP(guard.Handler(handler), log)), nil
}
