// Command admission answers "may key K go on?" from exact token buckets: over UDP for
// programs (admission/client), over HTTP for everybody (/qos, /auth, /v1/check), with
// rules in SQLite or PostgreSQL that operators edit over gRPC (srtm admission).
//
// Its parts: server decides, router speaks HTTP and gRPC, store keeps; rule, table and
// wire are the pure packages they stand on. Read docs/admission.md next.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/router"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/settings"
)

func main() {
	os.Exit(lifecycle.Main("admission", func(ctx context.Context) error { return run(ctx, os.Args[1:]) }))
}

func run(ctx context.Context, args []string) (err error) {
	opts, err := parse(args, os.Stdout)
	if errors.Is(err, settings.ErrDone) {
		return nil
	}
	if err != nil {
		return lifecycle.UsageError{Err: err}
	}
	log, err := obs.NewLogger(obs.Stderr, opts.logLevel, opts.logFormat)
	if err != nil {
		return lifecycle.UsageError{Err: err}
	}
	opts.guard.Log(log)
	registry := obs.NewRegistry()
	database, err := store.Open(ctx, opts.database)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, database.Close()) }()

	// Stopped in reverse: who asks first, who answers then.
	var group lifecycle.Group
	state := func() any { return nil }
	healthy := func() error { return nil }
	if opts.serves() {
		s, err := server.New(ctx, opts.serverConfig(database, log, registry))
		if err != nil {
			return err
		}
		opts.asks.Servers = []string{s.Addr().String()}
		state, healthy = func() any { return s.State() }, s.Healthy
		group.Add("server", s.Run)
		log.Info("admission decides", "udp", s.Addr().String())
	}
	asker, err := client.New(opts.asks)
	if err != nil {
		return err
	}
	group.Add("asker", func(ctx context.Context) error { <-ctx.Done(); asker.Close(); return nil })

	mux := http.NewServeMux()
	obs.Mount(mux, registry, state, healthy)
	rpc := grpc.NewServer(opts.guard.Options()...)
	if opts.routes() {
		router.NewHTTP(mux, asker, registry)
		srtmv1.RegisterAdmissionAdminServer(rpc, router.NewAdmin(database, asker))
	}
	checks := health.NewServer()
	healthv1.RegisterHealthServer(rpc, checks)
	reflection.Register(rpc)
	web, err := net.Listen("tcp", opts.httpAddress)
	if err != nil {
		return fmt.Errorf("--http-address: %w", err)
	}
	calls, err := net.Listen("tcp", opts.grpcAddress)
	if err != nil {
		web.Close()
		return fmt.Errorf("--grpc-address: %w", err)
	}
	group.Add("http", lifecycle.Serve(opts.guard.Listener(web), &http.Server{
		Handler: opts.guard.Handler(mux), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: time.Minute,
	}))
	group.Add("grpc", lifecycle.ServeGRPC(calls, rpc))
	group.Add("health", func(ctx context.Context) error {
		for name := range rpc.GetServiceInfo() {
			checks.SetServingStatus(name, healthv1.HealthCheckResponse_SERVING)
		}
		<-ctx.Done()
		checks.Shutdown()
		return nil
	})
	log.Info("admission is up", obs.KeyVersion, obs.Version(), "http", web.Addr().String(), "grpc", calls.Addr().String())
	err = group.Run(ctx)
	log.Info("admission is down")
	return err
}
