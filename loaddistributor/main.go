// Command loaddistributor is SRTM's placement controller: it decides which
// brokers carry a topic, keeps the catalog, and tells publishers and consumers
// where to go. It moves no message; while it is away, brokers go on.
//
// Its parts: rpc and lookup are the ways in, controller commits what placement
// decides to catalog, fitting judges. Read docs/ARCHITECTURE.md next.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/duplex"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/settings"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/lookup"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/tbadaptor/loop"
)

func main() {
	os.Exit(lifecycle.Main("loaddistributor", func(ctx context.Context) error { return run(ctx, os.Args[1:]) }))
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
	data, err := opts.openStore()
	if err != nil {
		return lifecycle.UsageError{Err: err}
	}
	err = alternate(ctx, opts, log, data, func(ctx context.Context, as role) error { return serve(ctx, opts, log, as) })
	return errors.Join(err, data.Close())
}

// serve runs everything in one role, until ctx ends or the role does.
func serve(ctx context.Context, opts *options, log *slog.Logger, as role) (err error) {
	registry := obs.NewRegistry()
	options := append(duplex.ServerOptions(), opts.guard.Options()...)
	noLedger := opts.tbadaptorAddress == "" && as.term == nil // the leader's adaptor has it, and brokers go there
	if noLedger {
		options = append(options, rpc.Elsewhere(srtmv1.GrantService_ServiceDesc.ServiceName, as.leader))
	}
	server := grpc.NewServer(options...)

	var adaptor controller.Adaptor
	var embedded *loop.Server
	var remote srtmv1.GrantServiceClient
	switch {
	case noLedger:
	case opts.tbadaptorAddress == "":
		cfg := opts.loopConfig(log, registry)
		cfg.Term = as.term
		if embedded, err = loop.New(cfg); err != nil {
			return err
		}
		srtmv1.RegisterGrantServiceServer(server, embedded)
		adaptor = embedded
	default:
		conn, err := dial(opts.tbadaptorAddress, opts.adaptorOptions)
		if err != nil {
			return lifecycle.UsageError{Err: fmt.Errorf("--tbadaptor-address: %w", err)}
		}
		defer conn.Close()
		remote = srtmv1.NewGrantServiceClient(conn)
		adaptor = controller.Remote{Client: remote}
	}
	cfg := opts.controllerConfig(log, registry)
	var control *controller.Controller
	if as.term != nil {
		cfg.Journal, cfg.Catalog = as.term, as.cat
		control, err = controller.New(cfg, adaptor)
	} else {
		control, err = controller.NewFollower(cfg, adaptor, as.leader)
	}
	if err != nil {
		return err
	}
	services := rpc.New(control)
	services.Register(server)
	healthy := health.NewServer()
	healthv1.RegisterHealthServer(server, healthy)
	reflection.Register(server)
	names := append(slices.Collect(maps.Keys(server.GetServiceInfo())), "") // "": all of it
	leaders := []string{srtmv1.BrokerService_ServiceDesc.ServiceName}       // what only the leader serves
	if noLedger {
		leaders = append(leaders, srtmv1.GrantService_ServiceDesc.ServiceName)
	}
	for _, name := range append(names, leaders...) {
		healthy.SetServingStatus(name, healthv1.HealthCheckResponse_NOT_SERVING)
	}

	rpcListener, err := net.Listen("tcp", opts.grpcAddress)
	if err != nil {
		return fmt.Errorf("--grpc-address: %w", err)
	}
	webListener, err := net.Listen("tcp", opts.httpAddress)
	if err != nil {
		rpcListener.Close()
		return fmt.Errorf("--http-address: %w", err)
	}

	nodes := opts.registryConfig()
	nodes.Self.HTTPPort = port(webListener)
	var nodeListener net.Listener
	if opts.tcpAddress != "" {
		if nodeListener, err = net.Listen("tcp", opts.tcpAddress); err != nil {
			return errors.Join(fmt.Errorf("--tcp-address: %w", err), rpcListener.Close(), webListener.Close())
		}
		nodes.Self.TCPPort = port(nodeListener)
	}
	directory := lookup.NewDirectory(control, nodes)
	mux := http.NewServeMux()
	lookup.Mount(mux, directory, obs.NSQ)
	lookup.MountPublisher(mux, control)
	obs.Mount(mux, registry, func() any { return state(control, embedded) }, nil)

	var open []string
	if opts.openLookup {
		open = lookup.Paths
	}

	// Stopped in reverse: health says so first, the controller rolls back while
	// the brokers' sessions are still up, then streams end, then servers.
	var group lifecycle.Group
	group.Add("http", lifecycle.Serve(opts.guard.Listener(webListener), &http.Server{Handler: opts.guard.Handler(mux, open...), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}))
	if nodeListener != nil {
		registrations := lookup.NewNodes(directory, nodes, log, registry)
		group.Add("nodes", func(ctx context.Context) error { return registrations.Run(ctx, nodeListener) })
	}
	group.Add("grpc", lifecycle.ServeGRPC(rpcListener, server))
	group.Add("sessions", services.Run)
	if embedded != nil {
		group.Add("adaptor", embedded.Run)
	}
	if remote != nil && as.term != nil {
		m := opts.mandate(as, clock.Mono())
		group.Add("mandate", func(ctx context.Context) error { return m.lend(ctx, log, as.term, remote) })
	}
	group.Add("controller", control.Run)
	if as.follow != nil {
		group.Add("store", func(ctx context.Context) error { return as.follow.Follow(ctx, control) })
	}
	group.Add("health", func(ctx context.Context) error {
		for {
			// A follower that has read nothing yet refuses what it is asked.
			informed, changed := control.Informed()
			for _, name := range names {
				is := healthv1.HealthCheckResponse_NOT_SERVING
				if informed && (as.term != nil || !slices.Contains(leaders, name)) {
					is = healthv1.HealthCheckResponse_SERVING
				}
				healthy.SetServingStatus(name, is)
			}
			select {
			case <-changed:
			case <-ctx.Done():
				healthy.Shutdown()
				return nil
			}
		}
	})
	// As NSQ's nsqlookupd says it.
	log.Info(obs.Banner("nsqlookupd"))
	log.Info("HTTP: listening on " + webListener.Addr().String())
	log.Info("GRPC: listening on " + rpcListener.Addr().String())
	tcp := "none"
	if nodeListener != nil {
		tcp = nodeListener.Addr().String()
		log.Info("TCP: listening on " + tcp)
	}
	log.Info("loaddistributor is up", obs.KeyVersion, obs.Version(), "grpc", rpcListener.Addr().String(),
		"http", webListener.Addr().String(), "tcp", tcp, "tbadaptor", opts.tbadaptorAddress, "seed", opts.seed, "leads", as.term != nil)
	err = group.Run(ctx)
	log.Info("loaddistributor is down")
	return err
}

func port(ln net.Listener) int { return ln.Addr().(*net.TCPAddr).Port }

// state is what /debug/state shows.
func state(control *controller.Controller, embedded *loop.Server) any {
	shown := struct {
		Controller any `json:"controller"`
		Adaptor    any `json:"adaptor,omitempty"`
	}{Controller: control.State()}
	if embedded != nil {
		shown.Adaptor = embedded.State()
	}
	return shown
}
