package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/loaddistributor/sizing"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
	"github.com/srtm-io/srtm/tools/sim/bucket"
)

// wanted holds the request for a contract proposal.
type wanted struct {
	srtmv1.ProfileTopicRequest
	lasts, within time.Duration
}

// flags adds the flags. when begins their help texts, to distinguish them from the
// command's other flags.
func (w *wanted) flags(cmd *cobra.Command, when string) {
	f := cmd.Flags()
	f.DurationVar(&w.lasts, "for", time.Minute, when+"how long to record arrivals, 10s to 24h; it ends sooner with 2,000,000 messages")
	f.DurationVar(&w.within, "within", 0, when+"longest access delay of the wanted --quantile, up to 1h")
	f.Float64Var(&w.Quantile, "quantile", 0.99, when+"`fraction` of messages that wait for a token no longer than --within")
	f.Float64Var(&w.Confidence, "confidence", 0.95, when+"`probability` that b is enough, 0.5 to 1")
	f.Float64Var(&w.Headroom, "headroom", 1.1, when+"r over the mean rate, above 1")
	f.Uint32Var(&w.Brokers, "brokers", 4, when+"for how many brokers to say what splitting costs, 1 to 32")
}

func (w *wanted) request(name string) *srtmv1.ProfileTopicRequest {
	w.Name, w.Lasts, w.Within = name, durationpb.New(w.lasts), durationpb.New(w.within)
	return &w.ProfileTopicRequest
}

func topicProfileCommand() *cobra.Command {
	var w wanted
	cmd := leaf(&cobra.Command{
		Use:   "profile NAME",
		Short: "Propose a contract (r, b) from what arrives",
		Long: `profile records a topic's arrivals for a while and proposes r and b with which
--quantile of the messages wait for a token no longer than --within, the burst with
--confidence; what it would cost to split it over more brokers; and what it would cost to be
wrong. It changes nothing. docs/contracts.md has an example.`,
		Example: `  srtm topic profile sensors --for 1h --within 2ms`,
		Args:    oneName,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if timeout := cmd.Flag("timeout"); !timeout.Changed {
				return timeout.Value.Set((w.lasts + time.Minute).String())
			}
			return nil
		},
	}, func(x *call) error {
		p, err := x.profile(w.request(x.args[0]))
		return x.show(p, err, func() error { return describeProfile(x.out, &w, p) })
	})
	w.flags(cmd, "")
	return cmd
}

// profile follows a profile until it is complete.
func (x *call) profile(r *srtmv1.ProfileTopicRequest) (*srtmv1.Profile, error) {
	stream, err := x.admin.ProfileTopic(x.ctx, r)
	if err != nil {
		return nil, err
	}
	for {
		got, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, errors.New("the loaddistributor ended the call without the profile")
		}
		if err != nil || got.GetProfile() != nil {
			return got.GetProfile(), err
		}
		fmt.Fprintf(x.cmd.ErrOrStderr(), "%s recorded\n", plural.Count(got.GetMessages(), "message"))
	}
}

func describeProfile(w io.Writer, wanted *wanted, p *srtmv1.Profile) error {
	fmt.Fprintf(w, "proposed  r %s msg/s, b %d\nrecorded  %s in %v, %.1f msg/s", thousandths(p.GetShare().GetRateMilli()), p.GetShare().GetBurst(),
		plural.Count(p.GetMessages(), "message"), p.GetSpan().AsDuration().Round(time.Second), p.GetMeanRate())
	if p.GetMissing() > 0 {
		fmt.Fprintf(w, "; %s are missing, of which nothing is known", percentText(p.GetMissing()))
	}
	fmt.Fprintf(w, "\nneeded    b %d for %s within %v; with a confidence of %s %d\n\n", p.GetNeededBurst(), percentText(wanted.Quantile), wanted.within, percentText(wanted.Confidence), p.GetShare().GetBurst())
	cells := func(d *srtmv1.AccessDelays) []any {
		return []any{d.GetMean().AsDuration().Round(time.Microsecond), d.GetQuantile().AsDuration().Round(time.Microsecond), percentText(d.GetLate())}
	}
	err := table(w, fmt.Sprintf("BROKERS\tMEAN DELAY\tP%g\tLATE", 100*wanted.Quantile), p.GetSplits(), func(s *srtmv1.SplitCost) []any {
		return append([]any{s.GetBrokers()}, cells(s.GetDelays())...)
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(w)
	return table(w, fmt.Sprintf("IF IT WERE\tR\tB\tMEAN DELAY\tP%g\tLATE", 100*wanted.Quantile), p.GetWrong(), func(e *srtmv1.WrongContract) []any {
		row := append([]any{e.GetWhat(), thousandths(e.GetShare().GetRateMilli()), e.GetShare().GetBurst()}, cells(e.GetDelays())...)
		if e.GetUnbounded() {
			row[len(row)-1] = row[len(row)-1].(string) + ", and more the longer it lasts"
		}
		return row
	})
}

// suggest sets the proposed contract in a specification.
func (x *call) suggest(n *newTopic, spec *srtmv1.TopicSpec) error {
	file, err := os.Open(n.suggest)
	if errors.Is(err, os.ErrNotExist) {
		p, err := x.profile(n.wanted.request(n.suggest))
		if err == nil {
			spec.Contract.RateMilli, spec.Contract.Burst = p.GetShare().GetRateMilli(), p.GetShare().GetBurst()
		}
		return err
	}
	if err != nil {
		return err
	}
	defer file.Close()
	arrivals, err := bucket.Read(n.suggest, file)
	if err != nil {
		return err
	}
	trace := make([]tuner.Arrival, len(arrivals))
	numbers := map[bucket.Arrival]int32{} // publisher numbers, by arrival without the time
	for i, a := range arrivals {
		arrival := bucket.Arrival{Key: a.Key, Publisher: a.Publisher}
		publisher, known := numbers[arrival]
		if !known {
			publisher = int32(len(numbers))
			numbers[arrival] = publisher
		}
		trace[i] = tuner.Arrival{At: a.At, Publisher: publisher}
	}
	slices.SortStableFunc(trace, func(a, b tuner.Arrival) int { return cmp.Compare(a.At, b.At) })
	p, err := sizing.Propose(trace, mono.Never, -mono.Never, sizing.Wanted{
		Quantile: n.wanted.Quantile, Within: n.wanted.within, Confidence: n.wanted.Confidence, Headroom: n.wanted.Headroom, Brokers: 1,
	}, rand.New(rand.NewPCG(1, uint64(len(trace)))))
	if err != nil {
		return fmt.Errorf("%s: %w", n.suggest, err)
	}
	spec.Contract.RateMilli, spec.Contract.Burst = int64(p.Rate), p.Burst
	return nil
}
