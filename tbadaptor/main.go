// Command tbadaptor is SRTM's share adaptor as a process of its own: it keeps
// who holds which share of which contract, and moves shares between brokers as
// their loads change. The loaddistributor has one embedded unless it is given
// the address of another.
//
// Its parts: loop is the service, ledger says who may have what when, share
// how a contract is divided. Read docs/ARCHITECTURE.md next.
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

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/duplex"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/settings"
	"github.com/srtm-io/srtm/tbadaptor/loop"
)

func main() {
	os.Exit(lifecycle.Main("tbadaptor", func(ctx context.Context) error { return run(ctx, os.Args[1:]) }))
}

func run(ctx context.Context, args []string) error {
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
	adaptor, err := loop.New(opts.loopConfig(log, registry))
	if err != nil {
		return err
	}
	server := grpc.NewServer(append(duplex.ServerOptions(), opts.guard.Options()...)...)
	srtmv1.RegisterGrantServiceServer(server, adaptor)
	healthy := health.NewServer()
	healthv1.RegisterHealthServer(server, healthy)
	reflection.Register(server)
	mux := http.NewServeMux()
	obs.Mount(mux, registry, func() any { return adaptor.State() }, nil)

	rpcListener, err := net.Listen("tcp", opts.grpcAddress)
	if err != nil {
		return fmt.Errorf("--grpc-address: %w", err)
	}
	webListener, err := net.Listen("tcp", opts.httpAddress)
	if err != nil {
		rpcListener.Close()
		return fmt.Errorf("--http-address: %w", err)
	}

	// Stopped in reverse: health says so first, then sessions end, then servers.
	var group lifecycle.Group
	group.Add("http", lifecycle.Serve(opts.guard.Listener(webListener), &http.Server{Handler: opts.guard.Handler(mux), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}))
	group.Add("grpc", lifecycle.ServeGRPC(rpcListener, server))
	group.Add("adaptor", adaptor.Run)
	group.Add("health", func(ctx context.Context) error {
		for name := range server.GetServiceInfo() {
			healthy.SetServingStatus(name, healthv1.HealthCheckResponse_SERVING)
		}
		<-ctx.Done()
		healthy.Shutdown()
		return nil
	})
	log.Info("tbadaptor is up", obs.KeyVersion, obs.Version(),
		"grpc", rpcListener.Addr().String(), "http", webListener.Addr().String())
	err = group.Run(ctx)
	log.Info("tbadaptor is down")
	return err
}
