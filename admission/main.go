// Command admission answers "may key K go on?" from exact token buckets. Programs send questions over UDP
// (admission/client), all other callers over HTTP (/qos, /auth, /v1/check). Operators edit the rules
// over gRPC (srtm admission). The rules are in SQLite or PostgreSQL.
//
// server decides, router serves HTTP and gRPC, and store saves the rules and credits; rule, table and
// wire are pure packages. Read docs/admission.md next.
package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/router"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/api/srtm/envoy"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/obs"
)

func main() { daemon.Main(new(options).program()) }

func (o *options) program() *daemon.Program {
	return &daemon.Program{
		Name: "admission", About: "admission answers whether a request of a key is within the key's rate, from exact token buckets.",
		Examples: `  admission --data-path=/var/lib/admission
  admission --database=postgres://admission@db.example.com/admission --udp-address=10.0.0.5:4193 \
    --mac-key-file=/etc/srtm/mac.keys`,
		Groups: o.groups(),
		First: []string{
			"http-address", "grpc-address", "udp-address", "role", "server", "data-path", "database", "mac-key-file", "max-keys", "default-reply",
			"tls-cert", "tls-key", "token-file", "config",
		},
		Values: map[string]string{
			"database": "postgres://admission@db.example.com/admission", "server": "127.0.0.1:4193", "default-reply-for": "tenant/=admit",
			"trace-endpoint": "http://127.0.0.1:4317", "allow-insecure-listen": "grpc-address", "checkpoint": "1s",
			"advertise": "10.0.0.5:4193", "advertise-grpc": "10.0.0.5:4192",
		},
		Validate: o.validate, Run: o.run,
	}
}

func (o *options) run(ctx context.Context, log *slog.Logger, _ *slog.LevelVar) error {
	o.peers.Log(log)
	database, err := store.Open(ctx, o.database)
	if err != nil {
		return err
	}
	err = o.addresses.Serve(ctx, "admission", log, nil, func(s *daemon.Servers) error {
		state := func() any { return nil }
		healthy := func() error { return nil }
		// The group stops in reverse order: the asker before the server that answers it.
		if o.serves() {
			decides, err := server.New(ctx, o.serverConfig(server.NewStore(database), log, s.Metrics, s.RPCListener.Addr().String()))
			if err != nil {
				return err
			}
			srtmv1.RegisterAdmissionReplicationServer(s.GRPC, decides)
			srtmv1.RegisterAdmissionStateServer(s.GRPC, server.NewStates(decides))
			o.decider.Servers = []string{cmp.Or(o.server.Advertise, decides.Addr().String())}
			o.decider.Local = decides.Local
			state, healthy = func() any { return decides.State() }, decides.Healthy
			s.Group.Add("server", decides.Run)
			log.Info("admission decides", "udp", decides.Addr().String())
		}
		asker, err := client.New(o.decider)
		if err != nil {
			return err
		}
		s.Group.Add("asker", asker.Run)
		s.Group.Add("servers", func(ctx context.Context) error { return followServers(ctx, database, asker, log) })
		obs.Mount(s.Mux, s.Metrics, state, healthy)
		if o.routes() {
			ask := router.NewAsker(asker, database, s.Metrics)
			router.MountHTTP(s.Mux, ask)
			envoy.RegisterRateLimitServiceServer(s.GRPC, router.NewEnvoy(ask))
			srtmv1.RegisterAdmissionAdminServer(s.GRPC, router.NewAdmin(database, database, asker))
		}
		s.HTTP.ReadTimeout = 10 * time.Second
		s.AddServers()
		return nil
	})
	return errors.Join(err, database.Close())
}

// followServers sets the asker's servers to the members in the store, until ctx ends.
func followServers(ctx context.Context, database *store.Store, asker *client.Client, log *slog.Logger) error {
	outage := obs.NewOutage(log, "the servers could not be read; using those that are known")
	for {
		members, err := database.Members(ctx)
		var addresses []string
		for _, m := range members {
			addresses = append(addresses, m.Address)
		}
		if err == nil {
			err = asker.SetServers(addresses)
		}
		if ctx.Err() == nil {
			outage.Note(err)
		}
		if !clock.Sleep(ctx, server.DefaultRenew) {
			return nil
		}
	}
}
