// Command tbadaptor is SRTM's share adaptor as a separate process. The adaptor records which broker
// holds which share of each contract, and moves shares between brokers as their loads change. The
// loaddistributor embeds an adaptor unless --tbadaptor-address is set.
//
// loop is the service, ledger decides who may hold which share and when, and share divides a contract.
// Read docs/ARCHITECTURE.md next.
package main

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/tbadaptor/loop"
)

func main() { daemon.Main(new(options).program()) }

// options has the configuration, from flags or from the file.
type options struct {
	addresses                  daemon.Addresses
	period, window, ackTimeout time.Duration
	leases                     *loop.LeaseFlags
}

func (o *options) program() *daemon.Program {
	o.addresses.GRPC, o.addresses.HTTP = "127.0.0.1:4180", "127.0.0.1:4181"
	return &daemon.Program{
		Name: "tbadaptor", About: "tbadaptor is SRTM's share adaptor as a process of its own.",
		Examples: `  tbadaptor
  tbadaptor --grpc-address=10.0.0.5:4180 --tls-cert=/etc/srtm/cert.pem --tls-key=/etc/srtm/key.pem \
    --tls-client-ca=/etc/srtm/ca.pem`,
		Groups: append(o.addresses.Groups("brokers and the loaddistributor", "metrics, profiles"), daemon.Group{Title: "Shares", Flags: o.flags}),
		First: []string{
			"grpc-address", "http-address", "period", "window", "flex-lease", "session-lease", "tls-cert", "tls-key", "tls-client-ca", "token-file",
			"config",
		},
		Values:   map[string]string{"trace-endpoint": "http://127.0.0.1:4317", "allow-insecure-listen": "grpc-address"},
		Validate: o.validate, Run: o.run,
	}
}

func (o *options) flags(fs *flag.FlagSet) {
	fs.DurationVar(&o.period, "period", loop.DefaultPeriod, "how often shares are proposed")
	fs.DurationVar(&o.window, "window", loop.DefaultWindow, "how far back the loads reach that proposals go by")
	fs.DurationVar(&o.ackTimeout, "ack-timeout", loop.DefaultAckTimeout, "how long brokers may take to acknowledge a new contract's shares")
	o.leases = loop.AddLeaseFlags(fs)
}

func (o *options) validate() error {
	return errors.Join(o.loopConfig(slog.New(slog.DiscardHandler), nil).Faults("--period", "--window", "--ack-timeout"), o.addresses.Validate())
}

func (o *options) loopConfig(log *slog.Logger, metrics prometheus.Registerer) loop.Config {
	return o.leases.Apply(loop.Config{Period: o.period, Window: o.window, AckTimeout: o.ackTimeout, ByMandate: true, Log: log, Metrics: metrics})
}

func (o *options) run(ctx context.Context, log *slog.Logger, _ *slog.LevelVar) error {
	return o.addresses.Serve(ctx, "tbadaptor", log, nil, func(s *daemon.Servers) error {
		adaptor, err := loop.New(o.loopConfig(log, s.Metrics))
		if err != nil {
			return err
		}
		srtmv1.RegisterGrantServiceServer(s.GRPC, adaptor)
		obs.Mount(s.Mux, s.Metrics, func() any { return adaptor.State() }, adaptor.Health)
		s.AddServers() // stopped in reverse order: sessions end first, then servers
		s.Group.Add("adaptor", adaptor.Run)
		return nil
	})
}
