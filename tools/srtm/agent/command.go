package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
)

// AddressEnv names the loaddistributor if the flag is not set.
const AddressEnv = "SRTM_LOADDISTRIBUTOR_ADDRESS"

type settings struct {
	tcpAddress, httpAddress string
	resend                  string
	producerOpts            []string
	trust                   secure.ClientConfig
	force                   string
	logLevel, logFormat     string
	cfg                     Config
}

var resends = map[string]client.Resend{"orderly": client.ResendOrderly, "always": client.ResendAlways, "never": client.ResendNever}

// Command returns `srtm agent`, which runs until its context ends.
func Command() *cobra.Command {
	o := &settings{cfg: DefaultConfig()}
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Publish for producers that know NSQ only",
		Long: `agent speaks NSQ's protocol to producers on this host, any NSQ library as it
is, and publishes for them: it looks up at the loaddistributor the broker of each
topic and publisher, forwards, retries, and follows when that changes. A producer
gets its OK after the broker's. Its client_id (in go-nsq Config.ClientID, else
the host's name) is the publisher's id, unless --publisher-id names one for all.

Exit code: 0; 1 on failure; 2 if the command line is wrong.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	address := cmp.Or(os.Getenv(AddressEnv), "127.0.0.1")
	fs := cmd.Flags()
	fs.Var(service.AddressFlag(&o.tcpAddress, "127.0.0.1", service.NSQPort), "tcp-address", "`host:port` for producers, NSQ's protocol")
	fs.Var(service.AddressFlag(&o.httpAddress, "127.0.0.1", service.AgentHTTPPort), "http-address", "`host:port` for metrics and profiles; empty for none")
	fs.Var(service.AddressFlag(&o.cfg.Loaddistributor, address, service.LoaddistributorPort), "loaddistributor-address", "gRPC `host:port` of the loaddistributor, or of several with commas (environment: "+AddressEnv+")")
	o.trust.Flags(fs, "", "the loaddistributor")
	fs.StringVar(&o.force, "allow-insecure-listen", "", "listen beyond loopback, where any host may publish: `which` of tcp-address,http-address (without a value all)")
	fs.Lookup("allow-insecure-listen").NoOptDefVal = "true"
	fs.StringVar(&o.cfg.PublisherID, "publisher-id", "", "`id` of all that is published here (default each producer's client_id)")
	fs.DurationVar(&o.cfg.PublishTimeout, "publish-timeout", o.cfg.PublishTimeout, "how long a publish may wait for a broker and its answer, and how long a large one may take to be received")
	fs.StringVar(&o.resend, "resend", "orderly", "`which` publishes without an answer are sent again: orderly (after an orderly end of the connection), always, never")
	fs.IntVar(&o.cfg.MaxConnections, "max-connections", o.cfg.MaxConnections, "how many producers there may be")
	fs.IntVar(&o.cfg.MaxPublishers, "max-publishers", o.cfg.MaxPublishers, "how many topics and publisher ids may be in use")
	fs.IntVar(&o.cfg.MaxOutstanding, "max-outstanding", o.cfg.MaxOutstanding, "how many publishes of one connection or publisher may be unanswered")
	fs.Int64Var(&o.cfg.MaxBuffer, "max-buffer", o.cfg.MaxBuffer, "how many `bytes` of publishes may be under way, and how many may be half received; producers wait beyond")
	fs.DurationVar(&o.cfg.IdleTimeout, "idle-timeout", o.cfg.IdleTimeout, "how long an unused publisher is kept")
	fs.DurationVar(&o.cfg.DrainTimeout, "drain-timeout", o.cfg.DrainTimeout, "how long to wait for answers at the end")
	fs.StringArrayVar(&o.producerOpts, "producer-opt", nil, "`option,value` of go-nsq for connections to brokers, such as tls_v1,true or auth_secret,x; may be repeated")
	fs.StringVar(&o.logLevel, "log-level", "info", "`level`: debug, info, warn or error")
	fs.StringVar(&o.logFormat, "log-format", "text", "`format`: text or json")
	return cmd
}

// validate completes the configuration, or returns all faults.
func (o *settings) validate() (Config, error) {
	var f faults.List
	log, _, err := obs.NewLogger(obs.Stderr, o.logLevel, o.logFormat)
	f.Add(err)
	cfg := o.cfg
	cfg.Log = log
	if o.force != "" {
		o.force, err = secure.Insecure("", o.force, "tcp-address", "http-address")
		f.If(err != nil, "--allow-insecure-listen: %w", err)
	}
	guard := secure.ServerConfig{Force: o.force}
	f.Add(guard.CheckPlain("--tcp-address", o.tcpAddress))
	f.Add(guard.CheckPlain("--http-address", o.httpAddress))
	cfg.DialOptions, err = o.trust.Load("")
	o.trust.Log(log)
	f.Add(err)
	resend, known := resends[o.resend]
	f.If(!known, "--resend %q is none of orderly, always, never", o.resend)
	cfg.Resend = resend
	for _, opt := range o.producerOpts {
		cfg.NSQ = cmp.Or(cfg.NSQ, client.DefaultNSQConfig())
		name, value, _ := strings.Cut(opt, ",")
		err := cfg.NSQ.Set(name, value)
		f.If(err != nil, "--producer-opt %q: %w", name, err)
	}
	f.Add(cfg.Validate())
	return cfg, f.Err()
}

func (o *settings) run(ctx context.Context) error {
	lifecycle.Survive()
	cfg, err := o.validate()
	if err != nil {
		return program.UsageError{Err: err}
	}
	defer daemon.ReloadAtHangup(cfg.Log)()
	metrics := obs.NewRegistry()
	cfg.Metrics = metrics
	a, err := New(cfg)
	if err != nil {
		return program.UsageError{Err: err}
	}
	unused := func(err error) error { return errors.Join(err, a.publishers.Close(ctx)) }
	ln, err := net.Listen("tcp", o.tcpAddress)
	if err != nil {
		return unused(fmt.Errorf("--tcp-address: %w", err))
	}
	var group lifecycle.Group
	text := "none"
	if o.httpAddress != "" {
		web, err := net.Listen("tcp", o.httpAddress)
		if err != nil {
			return unused(errors.Join(fmt.Errorf("--http-address: %w", err), ln.Close()))
		}
		text = web.Addr().String()
		mux := http.NewServeMux()
		obs.Mount(mux, metrics, a.State, a.Health)
		group.Add("http", lifecycle.Serve(web, lifecycle.HTTP(mux, cfg.Log)))
	}
	group.Add("agent", func(ctx context.Context) error { return a.Run(ctx, ln) })
	cfg.Log.Info("agent is up", obs.KeyVersion, program.Version(), obs.KeyAddress, ln.Addr().String(), "http", text, "loaddistributor", cfg.Loaddistributor)
	err = group.Run(ctx)
	cfg.Log.Info("agent is down")
	return err
}
