package main

import (
	"errors"
	"flag"
	"io"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/settings"
	"github.com/srtm-io/srtm/tbadaptor/loop"
)

// options are everything that can be configured, by flag or by file.
type options struct {
	grpcAddress, httpAddress string
	period                   time.Duration
	window                   time.Duration
	ackTimeout               time.Duration
	leases                   *loop.LeaseFlags
	security                 secure.ServerConfig
	guard                    *secure.Server // of security, once it is read
	logLevel, logFormat      string
}

// parse reads the flags and the file, and returns all that is wrong with them.
func parse(args []string, out io.Writer) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("tbadaptor", flag.ContinueOnError)
	fs.StringVar(&o.grpcAddress, "grpc-address", "127.0.0.1:4180", "`host:port` for gRPC: brokers and the loaddistributor")
	fs.StringVar(&o.httpAddress, "http-address", "127.0.0.1:4181", "`host:port` for HTTP: metrics, profiles")
	o.security.Flags(fs, "grpc-address", "http-address")
	fs.DurationVar(&o.period, "period", loop.DefaultPeriod, "how often shares are proposed")
	fs.DurationVar(&o.window, "window", loop.DefaultWindow, "how far back the loads reach that proposals go by")
	fs.DurationVar(&o.ackTimeout, "ack-timeout", loop.DefaultAckTimeout, "how long brokers may take to acknowledge a new contract's shares")
	o.leases = loop.AddLeaseFlags(fs)
	fs.StringVar(&o.logLevel, "log-level", "info", "`level`: debug, info, warn, error, or fatal (nothing)")
	fs.StringVar(&o.logFormat, "log-format", "text", "`format`: text or json")
	if err := settings.Parse(fs, args, "tbadaptor is SRTM's share adaptor.", "", out); err != nil {
		return nil, err
	}
	return o, o.validate()
}

func (o *options) validate() error {
	log, err := obs.NewLogger(io.Discard, o.logLevel, o.logFormat)
	if err != nil {
		log = slog.New(slog.DiscardHandler)
	}
	errs := []error{err, o.loopConfig(log, nil).Validate()}
	if o.guard, err = o.security.Load(); err != nil {
		errs = append(errs, err)
	} else {
		errs = append(errs, o.guard.CheckGRPC("--grpc-address", o.grpcAddress), o.guard.CheckHTTP("--http-address", o.httpAddress))
	}
	return errors.Join(errs...)
}

func (o *options) loopConfig(log *slog.Logger, metrics prometheus.Registerer) loop.Config {
	return o.leases.Apply(loop.Config{Period: o.period, Window: o.window, AckTimeout: o.ackTimeout, Lent: true, Log: log, Metrics: metrics})
}
