// Command loaddistributor is SRTM's placement controller. The loaddistributor decides which brokers
// carry a topic, keeps the catalog, and assigns publishers and consumers to brokers. The
// loaddistributor carries no messages. While it is unavailable, brokers continue.
//
// rpc and lookup serve requests. controller commits the decisions of placement to catalog, and tuner
// derives placements from measurements. Read docs/ARCHITECTURE.md next.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"time"

	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/srtm-io/srtm/admission/client"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/loaddistributor/controller"
	"github.com/srtm-io/srtm/loaddistributor/lookup"
	"github.com/srtm-io/srtm/loaddistributor/rpc"
	"github.com/srtm-io/srtm/loaddistributor/shortage"
	"github.com/srtm-io/srtm/loaddistributor/webhook"
	"github.com/srtm-io/srtm/tbadaptor/loop"
)

func main() { daemon.Main(new(options).program()) }

func (o *options) program() *daemon.Program {
	return &daemon.Program{
		Name: "loaddistributor", About: "loaddistributor is SRTM's placement controller, and an nsqlookupd.",
		Examples: `  loaddistributor --data-path=/var/lib/loaddistributor
  loaddistributor --store=etcd --etcd-endpoint=http://10.0.0.7:2379 \
    --advertise-address=10.0.0.5:4170`,
		Banner: program.Banner("nsqlookupd"), Groups: o.groups(), Validate: o.validate, Run: o.run,
		First: []string{
			"grpc-address", "http-address", "tcp-address", "store", "data-path", "etcd-endpoint", "advertise-address", "evacuate-after", "fitting",
			"rebalance", "tbadaptor-address", "tls-cert", "tls-key", "token-file", "config",
		},
		Values: map[string]string{
			"capacity-webhook": "https://scaler.example.com/brokers", "tenant-rate": "acme=5000", "etcd-endpoint": "http://127.0.0.1:2379", "console-host": "console.example.com",
			"console-admission-address": "10.0.0.6:4192", "console-gateway-address": "10.0.0.8:4196",
			"trace-endpoint": "http://127.0.0.1:4317", "allow-insecure-listen": "grpc-address", "advertise-address": "10.0.0.5:4170",
		},
	}
}

func (o *options) run(ctx context.Context, log *slog.Logger, _ *slog.LevelVar) error {
	for _, cfg := range []*secure.ClientConfig{&o.adaptorSecurity, &o.etcdSecurity, &o.brokerSecurity, &o.admissionSecurity, &o.gatewaySecurity, &o.webhookSecurity} {
		cfg.Log(log)
	}
	data, err := o.openStore(ctx, log)
	if err != nil {
		return program.UsageError{Err: err}
	}
	o.addresses.Kept = lifecycle.Listeners{} // shared by successive roles
	err = alternate(ctx, o, log, data, func(ctx context.Context, r role) error { return o.serve(ctx, log, r) })
	return errors.Join(err, o.addresses.Kept.Close(), data.Close())
}

// serve runs all services of one role, until ctx or the role ends.
func (o *options) serve(ctx context.Context, log *slog.Logger, r role) error {
	var options []grpc.ServerOption
	noLedger := o.tbadaptorAddress == "" && r.term == nil // the leader's adaptor has the ledger, and serves the brokers
	if noLedger {
		options = append(options, rpc.Elsewhere(srtmv1.GrantService_ServiceDesc.ServiceName, r.leader))
	}
	var nodes net.Listener
	if o.tcpAddress != "" {
		var err error
		if nodes, err = o.addresses.Kept.Listen("--tcp-address", o.tcpAddress); err != nil {
			return err
		}
		defer nodes.Close() // closed already if it was served
	}
	var adaptor controller.Adaptor
	var remote srtmv1.GrantServiceClient
	var shares grpc.ClientConnInterface
	acting := &adaptorHealth{address: o.tbadaptorAddress}
	if o.tbadaptorAddress != "" {
		conn, err := dial(o.tbadaptorAddress, o.adaptorOptions)
		if err != nil {
			return program.UsageError{Err: fmt.Errorf("--tbadaptor-address: %w", err)}
		}
		defer conn.Close()
		shares, remote = conn, srtmv1.NewGrantServiceClient(conn)
		adaptor = controller.Remote{Client: remote}
	}
	return o.addresses.Serve(ctx, "loaddistributor", log, options, func(s *daemon.Servers) (err error) {
		var embedded *loop.Server
		if o.tbadaptorAddress == "" && !noLedger {
			cfg := o.loopConfig(log, s.Metrics)
			cfg.Term = r.term
			if embedded, err = loop.New(cfg); err != nil {
				return err
			}
			srtmv1.RegisterGrantServiceServer(s.GRPC, embedded)
			adaptor = embedded
		}
		cfg := o.controllerConfig(log, s.Metrics)
		cfg.Traces = s.Traces
		if o.hook != nil && r.term != nil {
			hook := *o.hook
			hook.Log, hook.Metrics = log, s.Metrics
			posts := webhook.New(hook)
			cfg.Lacking = func(need shortage.Need) { posts.Send(lacking(need, time.Now())) }
			s.Group.Add("webhook", posts.Run)
		}
		var control *controller.Controller
		if r.term != nil {
			cfg.Journal, cfg.Catalog = r.term, r.cat
			control, err = controller.New(cfg, adaptor)
		} else if control, err = controller.NewFollower(cfg, adaptor, r.leader); err == nil && r.cat != nil {
			control.Reset(r.cat)
			control.Cut(errors.New("it was led from here, and has to be read anew"))
		}
		if err != nil {
			return err
		}
		services := rpc.New(control)
		services.Reserve(o.reservation)
		services.CreateTopics(rpc.AutoCreate{
			Off: o.autoCreate == autoCreateOff, Topic: o.topic, MaxTopics: o.maxTopics, MaxTenantTopics: o.maxTenantTopics,
		}, s.Metrics)
		if len(o.admissionClient.Servers) > 0 {
			admission, err := client.New(o.admissionClient)
			if err != nil {
				return fmt.Errorf("--admission-address: %w", err)
			}
			services.Limit(admission)
			s.Group.Add("admission", admission.Run)
		}
		services.Register(s.GRPC)
		s.Health.SetServingStatus(srtmv1.GrantService_ServiceDesc.ServiceName, healthv1.HealthCheckResponse_NOT_SERVING) // watch sets the status
		s.Watch = func(ctx context.Context) { watch(ctx, s, control, r, noLedger) }
		node := o.registryConfig()
		node.Self.HTTPPort = port(s.WebListener)
		if nodes != nil {
			node.Self.TCPPort = port(nodes)
		}
		directory := lookup.NewDirectory(control.View(), node)
		lookup.Mount(s.Mux, directory, program.NSQ, s.Metrics)
		lookup.MountPublisher(s.Mux, control.View())
		obs.Mount(s.Mux, s.Metrics, func() any { return state(control, embedded) }, func() error {
			if informed, _ := control.View().Informed(); !informed {
				return errors.New("cut off from the store: reads are answered from what was read before, and changes are refused until the store answers")
			}
			if r.term == nil && r.leader() == "" {
				return errors.New("no process leads: changes are refused until the store lets a process lead")
			}
			return acting.Err()
		})
		if o.openLookup {
			s.Open = lookup.Paths
		}

		// The group stops in reverse order: health first, then the controller, which rolls back while
		// the brokers' sessions are open, then the streams, then the servers.
		s.AddServers()
		if o.console {
			if err := o.addConsole(s, log, shares, func(registrar grpc.ServiceRegistrar) {
				services.Register(registrar)
				if embedded != nil {
					srtmv1.RegisterGrantServiceServer(registrar, embedded)
				}
			}); err != nil {
				return err
			}
		}
		if nodes != nil {
			registrations := lookup.NewNodes(directory, node, log, s.Metrics)
			s.Group.Add("nodes", func(ctx context.Context) error { return registrations.Run(ctx, nodes) })
		}
		s.Group.Add("sessions", services.Run)
		if embedded != nil {
			s.Group.Add("adaptor", embedded.Run)
		}
		if remote != nil && r.term != nil {
			m := o.mandate(r, clock.Mono())
			s.Group.Add("mandate", func(ctx context.Context) error { return m.lend(ctx, log, r.term, remote, acting) })
		}
		s.Group.Add("controller", control.Run)
		if r.store != nil {
			s.Group.Add("store", func(ctx context.Context) error { return r.store.Follow(ctx, control) })
		}
		// The log lines have the format of NSQ's nsqlookupd.
		log.Info(program.Banner("nsqlookupd"))
		log.Info("HTTP: listening on " + s.WebListener.Addr().String())
		log.Info("GRPC: listening on " + s.RPCListener.Addr().String())
		tcp := "none"
		if nodes != nil {
			tcp = nodes.Addr().String()
			log.Info("TCP: listening on " + tcp)
		}
		s.Up = []any{"tcp", tcp, "tbadaptor", o.tbadaptorAddress, "seed", o.seed, "leads", r.term != nil}
		return nil
	})
}

// watch sets the health of the services until ctx ends. A follower is unhealthy until it has read the
// store. Services of the leader alone are healthy only at the leader.
func watch(ctx context.Context, s *daemon.Servers, control *controller.Controller, r role, noLedger bool) {
	names := append(slices.Collect(maps.Keys(s.GRPC.GetServiceInfo())), "") // "": the whole server
	leaders := []string{srtmv1.BrokerService_ServiceDesc.ServiceName}
	if noLedger {
		leaders = append(leaders, srtmv1.GrantService_ServiceDesc.ServiceName)
	}
	for {
		informed, changed := control.View().Informed()
		for _, name := range append(names, leaders...) {
			status := healthv1.HealthCheckResponse_NOT_SERVING
			if informed && (r.term != nil || !slices.Contains(leaders, name)) {
				status = healthv1.HealthCheckResponse_SERVING
			}
			s.Health.SetServingStatus(name, status)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

func port(ln net.Listener) int { return ln.Addr().(*net.TCPAddr).Port }

// state returns the data of /debug/state.
func state(control *controller.Controller, embedded *loop.Server) any {
	state := struct {
		Controller any `json:"controller"`
		Adaptor    any `json:"adaptor,omitempty"`
	}{Controller: control.View().State()}
	if embedded != nil {
		state.Adaptor = embedded.State()
	}
	return state
}
