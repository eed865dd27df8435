package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tools/iotpub/greedy"
)

// greedyRun is the configuration of iotpub greedy.
type greedyRun struct {
	topic, prefix, nsqd, loaddistributor string
	trust                                secure.ClientConfig
	publishers, size                     int
	weights                              []uint
	warm, duration                       time.Duration
}

// greedyReport is the result, by weight.
type greedyReport struct {
	Seconds  float64        `json:"seconds"`
	Accepted float64        `json:"accepted_per_second"`
	Refused  float64        `json:"refused_per_second"`
	Weights  []greedyWeight `json:"weights"`
}

type greedyWeight struct {
	Weight     uint    `json:"weight"`
	Publishers int     `json:"publishers"`
	Mean       float64 `json:"mean_accepted_per_second"` // per publisher
	Least      float64 `json:"least"`
	Most       float64 `json:"most"`
	// Part is Mean divided by the weight's proportional share of all accepted messages.
	Part float64 `json:"of_its_part"`
}

func greedyCommand() *cobra.Command {
	r := greedyRun{topic: "sensors", prefix: "greedy", publishers: 50, size: 100, weights: []uint{1, 2, 4, 8, 10}, warm: 10 * time.Second, duration: 20 * time.Second}
	output := "text"
	cmd := &cobra.Command{
		Use:   "greedy",
		Short: "Send as much as the weights of publishers allow, and report the rate of each weight",
		Long: `greedy connects publishers that request a pace from their broker (PACE) with their
weight, and send as fast as the pace allows. Publishers of weight 0 request no pace, as
stock producers. greedy reports the accepted messages of each weight, and compares them
with the weight's part of all messages. A broker grants at most nsqd --max-weight (1 by
default), or the weight of the publisher's group in a cluster.`,
		Example: `  iotpub greedy --nsqd-tcp-address 127.0.0.1:4150 --publishers 50 --weight 1,2,4,8,10
  iotpub greedy --loaddistributor-address 127.0.0.1:4170 --topic sensors --id-prefix pool \
    --publishers 10 --weight 1`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := r.validate(output); err != nil {
				return program.UsageError{Err: err}
			}
			rep, err := r.run(cmd.Context())
			if err != nil {
				return err
			}
			if output == "json" {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(rep)
			}
			return rep.write(cmd.OutOrStdout())
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&r.topic, "topic", r.topic, "topic to publish to")
	fs.Var(service.AddressFlag(&r.nsqd, "", service.NSQPort), "nsqd-tcp-address", "`host:port` of the broker that all publishers connect to")
	fs.Var(service.AddressFlag(&r.loaddistributor, "", service.LoaddistributorPort), "loaddistributor-address", "gRPC `host:port` of the loaddistributor that assigns a broker to each publisher, in place of --nsqd-tcp-address")
	r.trust.Flags(fs, "", "the loaddistributor")
	fs.StringVar(&r.prefix, "id-prefix", r.prefix, "`prefix` of the publishers' ids: a dot and a number follow")
	fs.IntVar(&r.publishers, "publishers", r.publishers, "`number` of publishers")
	fs.UintSliceVar(&r.weights, "weight", r.weights, "`weights` of the publishers, in turns, 1 to 255; 0: request no pace")
	fs.IntVar(&r.size, "size", r.size, "size of a message, in `bytes`")
	fs.DurationVar(&r.warm, "warm-up", r.warm, "time before counting")
	fs.DurationVar(&r.duration, "duration", r.duration, "time of counting")
	fs.StringVar(&output, "output", output, "`form` of the report: text or json")
	return cmd
}

func (r *greedyRun) validate(output string) error {
	var f faults.List
	f.If(output != "text" && output != "json", "output %q: want text or json", output)
	f.If(!wire.ValidTopicName(r.topic), "topic: %q is no valid name", r.topic)
	f.If((r.nsqd == "") == (r.loaddistributor == ""), "want either the address of a broker or that of a loaddistributor")
	f.If(r.publishers < 1 || r.size < 1, "publishers: %d, size: %d: want at least 1", r.publishers, r.size)
	f.If(r.warm < 0 || r.duration <= 0, "warm-up %v, duration %v: want 0 or more, and more than 0", r.warm, r.duration)
	f.If(len(r.weights) == 0, "no weight")
	for _, w := range r.weights {
		f.If(w > 255, "weight: %d, want 0 to 255", w)
	}
	return f.Err()
}

func (r *greedyRun) run(ctx context.Context) (_ *greedyReport, err error) {
	lookup := func(string) func(context.Context) (string, error) {
		return func(context.Context) (string, error) { return r.nsqd, nil }
	}
	if r.loaddistributor != "" {
		options, err := r.trust.Load("")
		if err != nil {
			return nil, err
		}
		conn, err := service.Dial(r.loaddistributor, options...)
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		placement := srtmv1.NewPlacementServiceClient(conn)
		lookup = func(id string) func(context.Context) (string, error) {
			return func(ctx context.Context) (string, error) {
				resolved, err := placement.Resolve(ctx, &srtmv1.ResolveRequest{Topic: r.topic, PublisherId: id}, grpc.WaitForReady(true))
				return resolved.GetAssignment().GetTcpAddress(), err
			}
		}
	}
	sending, stop := context.WithCancel(ctx)
	defer stop()
	all, sending := errgroup.WithContext(sending)
	publishers := make([]*greedy.Publisher, r.publishers)
	for i := range publishers {
		p := &greedy.Publisher{ID: fmt.Sprint(r.prefix, ".", i), Weight: uint8(r.weights[i%len(r.weights)])}
		publishers[i] = p
		all.Go(func() error { return p.Run(sending, r.topic, r.size, lookup(p.ID)) })
	}
	clock.Sleep(sending, r.warm)
	began, before := time.Now(), counts(publishers)
	clock.Sleep(sending, r.duration)
	seconds, after := time.Since(began).Seconds(), counts(publishers)
	stop()
	if err := all.Wait(); err != nil {
		return nil, err
	}
	return r.report(seconds, before, after), nil
}

type count struct{ accepted, refused int64 }

func counts(publishers []*greedy.Publisher) (all []count) {
	for _, p := range publishers {
		all = append(all, count{p.Accepted.Load(), p.Refused.Load()})
	}
	return all
}

func (r *greedyRun) report(seconds float64, before, after []count) *greedyReport {
	rep := &greedyReport{Seconds: seconds}
	byWeight, sum := map[uint]*greedyWeight{}, 0.0
	var order []uint
	for i := range after {
		w := r.weights[i%len(r.weights)]
		rate := float64(after[i].accepted-before[i].accepted) / seconds
		rep.Accepted += rate
		rep.Refused += float64(after[i].refused-before[i].refused) / seconds
		sum += float64(max(w, 1))
		result := byWeight[w]
		if result == nil {
			result = &greedyWeight{Weight: w, Least: rate}
			byWeight[w] = result
			order = append(order, w)
		}
		result.Mean = (result.Mean*float64(result.Publishers) + rate) / float64(result.Publishers+1)
		result.Publishers++
		result.Least, result.Most = min(result.Least, rate), max(result.Most, rate)
	}
	for _, w := range order {
		if rep.Accepted > 0 {
			byWeight[w].Part = byWeight[w].Mean / (rep.Accepted * float64(max(w, 1)) / sum)
		}
		rep.Weights = append(rep.Weights, *byWeight[w])
	}
	return rep
}

func (rep *greedyReport) write(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "accepted %.1f msg/s, refused %.1f msg/s, in %.1f s\n", rep.Accepted, rep.Refused, rep.Seconds)
	fmt.Fprintln(w, "weight\tpublishers\tmean msg/s\tleast\tmost\tof its part\t")
	for _, x := range rep.Weights {
		fmt.Fprintf(w, "%d\t%d\t%.2f\t%.2f\t%.2f\t%.3f\t\n", x.Weight, x.Publishers, x.Mean, x.Least, x.Most, x.Part)
	}
	return w.Flush()
}
