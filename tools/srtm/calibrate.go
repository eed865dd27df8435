package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/srtm/calibrate"
	"github.com/srtm-io/srtm/tools/srtm/calibrate/search"
)

// calibration is the output of `srtm broker calibrate`.
type calibration struct {
	Broker      string  `json:"broker,omitempty"` // broker id, if known
	TCP         string  `json:"tcp_address"`
	HTTP        string  `json:"http_address"`
	Quantile    float64 `json:"slo_quantile"`
	LatencyUs   int64   `json:"slo_latency_us"`
	Connections int     `json:"connections"`
	Size        int     `json:"size"` // bytes
	Tolerance   float64 `json:"tolerance"`
	Seed        uint64  `json:"seed"`
	*calibrate.Result
	// Applied means that the loaddistributor now places by Mcap.
	Applied bool `json:"applied"`
	// Note is a caveat for people.
	Note string `json:"note,omitempty"`
}

func brokerCalibrateCommand() *cobra.Command {
	var c cli
	var cfg calibrate.Config
	var trust secure.ClientConfig
	var apply bool
	cmd := &cobra.Command{
		Use:   "calibrate [BROKER]",
		Short: "Measure what a broker carries within an SLO",
		Long: `calibrate sends a running broker messages of many Poisson publishers, at rates that
double until the SLO is missed and then close in on the maximum rate that keeps
it, which is tried once more: the broker's mcap. One subscriber finishes every
message. BROKER is the id of a broker in a cluster; the loaddistributor creates the
topics on it, and on it alone. Without one, the broker is in no cluster, and is at
--nsqd-tcp-address and --nsqd-http-address; with --apply it sends its id itself.

With --nsqd-tls-ca publishers, subscriber and HTTP use TLS, by the broker's HTTPS where it
has no other. That takes more of this machine. A broker that requires AUTH cannot be
measured while it does.

A rate is judged by the broker's own delivery latencies, from the arrival in its
kernel to the write to the subscriber. A rate that this program could not send in
time (at the SLO's quantile, within half of its latency) counts as not offered, never
as missed: then the mcap is at least what is printed. On the broker's own machine
that is soon so; run it on another.

The topics are gone afterwards; those in a cluster (srtm-calibrate-...) only if this
program is not killed, and srtm topic delete removes them then. A broker that carries topics is
refused, for they would be disturbed, and would disturb; --force measures what is
left beside them. --apply sends the result to the loaddistributor, to place by,
until srtm broker capacity changes it.

Exit code: 0; 1 on failure, or if not even --least was kept; 2 if the command line is
wrong.`,
		Args: between(0, 1, "one broker"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.check(); err != nil {
				return err
			}
			cfg.Logger = slog.New(slog.DiscardHandler) // the outcome covers go-nsq's connection errors
			var err error
			if cfg.TLS, err = trust.TLS("nsqd-"); err != nil {
				return program.UsageError{Err: err}
			}
			id := ""
			if len(args) == 1 {
				if id = args[0]; cfg.TCP != "" || cfg.HTTP != "" {
					return usagef("want a broker's id or its addresses, not both")
				}
				b, err := c.broker(cmd.Context(), id)
				if err != nil {
					return err
				}
				cfg.TCP, cfg.HTTP = b.GetTcpAddress(), b.GetHttpAddress()
			}
			if err := cfg.Validate(); err != nil {
				return program.UsageError{Err: err}
			}
			if id == "" && apply {
				var err error
				if id, err = calibrate.Identity(cmd.Context(), cfg.HTTP, cfg.TLS); err != nil {
					return err
				}
				// Check before loading the broker.
				if _, err := c.broker(cmd.Context(), id); err != nil {
					return err
				}
			}
			if id != "" {
				cfg.Create, cfg.Remove = c.measured(id, cfg.SLO)
			}
			return c.calibrate(cmd, cfg, id, apply)
		},
	}
	f := cmd.Flags()
	f.Var(service.AddressFlag(&cfg.TCP, "", service.NSQPort), "nsqd-tcp-address", "`host:port` of the broker for NSQ clients")
	f.Var(service.AddressFlag(&cfg.HTTP, "", service.NSQHTTPPort), "nsqd-http-address", "`host:port` of its HTTP")
	trust.TLSFlags(f, "nsqd-", "the broker")
	f.Lookup("nsqd-tls-ca").Usage = "PEM `file` of the authorities of the broker's certificate, or \"" + secure.SystemCA + "\": measure it with TLS"
	f.Float64Var(&cfg.SLO.Quantile, "slo-quantile", 0.99, "`fraction` of messages that the SLO's latency holds for")
	f.DurationVar(&cfg.SLO.Latency, "slo-latency", 10*time.Millisecond, "latency within which they are delivered")
	f.IntVar(&cfg.Connections, "connections", 100, "`number` of publishers, each with a connection")
	f.IntVar(&cfg.Size, "size", 100, "size of a message in `bytes`")
	f.Int64Var(&cfg.Search.First, "first", 1000, "rate to begin with, in `msg/s`")
	f.Int64Var(&cfg.Search.Least, "least", 100, "minimum rate to try, in `msg/s`")
	f.Int64Var(&cfg.Search.Most, "most", 1_000_000, "maximum rate to try, in `msg/s`")
	f.Float64Var(&cfg.Search.Tolerance, "tolerance", 0.05, "how far below the lowest rate that is not kept the result may be, as a `part` of it")
	f.IntVar(&cfg.Search.Steps, "steps", 60, "maximum `number` of tries")
	f.IntVar(&cfg.Search.Again, "again", 2, "`times` that a rate which could not be sent in time is tried again")
	f.DurationVar(&cfg.Settle, "settle", time.Second, "how long a rate is sent before it is measured")
	f.DurationVar(&cfg.Step, "step", 3*time.Second, "how long it is measured, at least")
	f.DurationVar(&cfg.Limit, "limit", 5*time.Minute, "how long all of it may take")
	f.IntVar(&cfg.Workers, "workers", 1, "`number` of threads that send")
	f.Uint64Var(&cfg.Seed, "seed", 1, "`seed` of the publishers' times")
	f.BoolVar(&cfg.Force, "force", false, "measure a broker that carries topics, too")
	f.BoolVar(&apply, "apply", false, "have the loaddistributor place by what is found")
	c.flags(cmd)
	return cmd
}

// broker returns a connected broker from the loaddistributor.
func (c *cli) broker(ctx context.Context, id string) (b *srtmv1.Broker, err error) {
	err = c.call(ctx, func(x *call) error {
		r, err := x.admin.ListBrokers(x.ctx, &srtmv1.ListBrokersRequest{})
		if err != nil {
			return err
		}
		if b = brokerOf(r, id); b == nil {
			return fmt.Errorf("the loaddistributor knows no broker %q", id)
		}
		if !b.GetConnected() {
			return fmt.Errorf("broker %s is gone", id)
		}
		return nil
	})
	return b, err
}

// measured returns functions that create and delete topics through the loaddistributor,
// because clients cannot do this on a broker of a cluster.
func (c *cli) measured(id string, slo search.SLO) (makes, removes func(context.Context, string) error) {
	makes = func(ctx context.Context, topic string) error {
		return c.call(ctx, func(x *call) error {
			_, err := topics.Create(x.ctx, x.admin, &srtmv1.CreateTopicRequest{
				MeasuredBrokerId: id,
				Spec: &srtmv1.TopicSpec{Name: topic, Contract: &srtmv1.Contract{
					RateMilli: int64(tokenbucket.MaxRate), Burst: tokenbucket.MaxBurst,
					Slo: &srtmv1.Slo{Quantile: slo.Quantile, Latency: durationpb.New(slo.Latency)},
				}},
			}, nil)
			return err
		})
	}
	removes = func(ctx context.Context, topic string) error {
		return c.call(ctx, func(x *call) error {
			_, err := x.admin.DeleteTopic(x.ctx, &srtmv1.DeleteTopicRequest{Name: topic})
			if status.Code(err) == codes.NotFound {
				return nil
			}
			return err
		})
	}
	return makes, removes
}

func (c *cli) calibrate(cmd *cobra.Command, cfg calibrate.Config, id string, apply bool) error {
	progress := cmd.ErrOrStderr()
	result, err := calibrate.Run(cmd.Context(), cfg, func(s calibrate.Step) {
		fmt.Fprintf(progress, "%d msg/s: %v%s\n", s.Rate, s.Outcome, because(s.Why))
	})
	if carries := (*calibrate.CarriesError)(nil); errors.As(err, &carries) {
		return fmt.Errorf("%w; --force measures all the same", err)
	}
	if result == nil {
		return err
	}
	out := calibration{
		Broker: id, TCP: cfg.TCP, HTTP: cfg.HTTP, Quantile: cfg.SLO.Quantile, LatencyUs: cfg.SLO.Latency.Microseconds(),
		Connections: cfg.Connections, Size: cfg.Size, Tolerance: cfg.Search.Tolerance, Seed: cfg.Seed, Result: result,
	}
	if host, _, e := net.SplitHostPort(cfg.TCP); e == nil && loopback(host) {
		out.Note = "publishers, subscriber and broker shared this machine: alone, the broker carries more"
	}
	if apply && result.Known() {
		e := c.call(cmd.Context(), func(x *call) error {
			_, err := x.admin.SetBrokerCapacity(x.ctx, &srtmv1.SetBrokerCapacityRequest{BrokerId: id, Mcap: result.Mcap})
			return err
		})
		out.Applied = e == nil
		err = errors.Join(err, e)
	}
	w := cmd.OutOrStdout()
	return errors.Join(err, c.print(w, out, func() error { return out.table(w, apply) }))
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}

func (c *calibration) table(w io.Writer, apply bool) error {
	q := fmt.Sprintf("p%g", c.Quantile*100)
	head := fmt.Sprintf("msg/s\tOFFERED\tOUTCOME\tDELAY %s\tLATE %s\tEXCEEDED\tWHY", q, q)
	if err := table(w, head, c.Steps, func(s calibrate.Step) []any {
		return []any{s.Rate, fmt.Sprintf("%.0f", s.Offered), s.Outcome, s.Delay, s.Late, fmt.Sprintf("%d/%d", s.Exceeded, s.Delivered), s.Why}
	}); err != nil {
		return err
	}
	who := "broker at " + c.TCP
	if c.Broker != "" {
		who = "broker " + c.Broker
	}
	slo := fmt.Sprintf("%s within %v", q, time.Duration(c.LatencyUs)*time.Microsecond)
	var text string
	switch c.Limit {
	case calibrate.LimitBroker:
		text = fmt.Sprintf("mcap %d msg/s, %d is too much", c.Mcap, c.Over)
	case calibrate.LimitGenerator:
		text = fmt.Sprintf("mcap at least %d msg/s: more could not be sent in time", c.Mcap)
	case calibrate.LimitMost:
		text = fmt.Sprintf("mcap at least %d msg/s: more was not to be tried", c.Mcap)
	default:
		text = fmt.Sprintf("no time or step was left to be sure of %d msg/s", c.Mcap)
	}
	if c.Mcap == 0 {
		text = "no rate that was tried is kept"
	}
	text = fmt.Sprintf("%s, %s: %s\n", who, slo, text)
	if c.Note != "" {
		text += c.Note + "\n"
	}
	if c.Applied {
		text += "applied: the loaddistributor places by it\n"
	} else if apply {
		text += "not applied\n"
	}
	_, err := io.WriteString(w, text)
	return err
}
