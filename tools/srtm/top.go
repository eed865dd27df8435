package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/tools/srtm/screen"
)

// refresh is how often a command updates its output, in place on a terminal.
type refresh struct {
	every time.Duration
	count int64
}

func (r *refresh) flags(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().DurationVar(&r.every, "interval", 2*time.Second, "`time` between two updates")
	cmd.Flags().Int64Var(&r.count, "count", 0, "number of `updates`; 0: until an interrupt on a terminal, and one elsewhere")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if r.every < 100*time.Millisecond || r.count < 0 {
			return usagef("--interval %v: want at least 100ms; --count %d: must not be negative", r.every, r.count)
		}
		return nil
	}
	return cmd
}

// run shows the output of look repeatedly. After the first success run shows errors of
// look, too, and returns only an error of the last update.
func (r *refresh) run(x *call, render func(ctx context.Context, w io.Writer) error) error {
	x.progress.stop()
	s := screen.New(x.cmd.OutOrStdout())
	s.Terminal = s.Terminal && x.cli.output == formTable
	count := r.count
	if count == 0 && !s.Terminal {
		count = 1
	}
	shown := ""
	for n := int64(1); ; n++ {
		ctx, cancel := context.WithTimeout(x.cmd.Context(), x.cli.timeout)
		var b strings.Builder
		err := render(ctx, &b)
		cancel()
		switch {
		case x.cmd.Context().Err() != nil:
			return nil
		case err != nil && (n == 1 || n == count):
			return err
		case err != nil:
			fmt.Fprintf(&b, "%s\n%s: %v\n", shown, time.Now().Format(time.TimeOnly), explain(err))
		default:
			shown = b.String()
		}
		if err := s.Draw(b.String()); err != nil {
			return err
		}
		if n == count || !clock.Sleep(x.cmd.Context(), r.every) {
			return nil
		}
	}
}

func topicWatchCommand() *cobra.Command {
	var r refresh
	return r.flags(leaf(&cobra.Command{
		Use:   "watch NAME",
		Short: "Show a topic as describe does, again and again",
		Long:  `watch shows a topic as describe does, in place on a terminal until an interrupt.`,
		Args:  oneName,
	}, func(x *call) error {
		return r.run(x, func(ctx context.Context, w io.Writer) error {
			t, err := x.topicSummary(ctx, x.args[0])
			if err != nil {
				return err
			}
			return x.cli.print(w, t, func() error { return describe(w, t) })
		})
	}))
}

func topCommand() *cobra.Command {
	var r refresh
	var limit int
	cmd := r.flags(leaf(&cobra.Command{
		Use:   "top [TOPIC...]",
		Short: "Show what topics carry, how late they are, and why, live",
		Long: `top shows the topics, those first that miss their SLO, then those with the most traffic:
messages per second that were offered, released (had their tokens) and delivered in the
newest interval; those that wait for tokens (BACKLOG) and for consumers (DEPTH); and over
the window the p99 of the delivery latency, of which access delay is the wait for tokens
and processing delay the broker's, and of the consumers' delay, which is no part of it.

Without names it shows the first --limit topics by name. On a terminal it runs until an
interrupt; elsewhere it prints once.`,
		Example: `  srtm top
  srtm top sensors valves --interval 1s
  srtm top --output json | jq '.[] | select(.slo == "missed") | .topic'`,
		Args: func(*cobra.Command, []string) error {
			if limit < 1 || limit > 1000 {
				return usagef("--limit %d: want 1 .. 1000", limit)
			}
			return nil
		},
	}, func(x *call) error {
		return r.run(x, func(ctx context.Context, w io.Writer) error { return x.top(ctx, w, limit) })
	}))
	cmd.Flags().IntVar(&limit, "limit", 50, "`topics` to show at most, 1 .. 1000, if none are named")
	return cmd
}

// activity is the line of a topic in top. Times are in microseconds.
type activity struct {
	Topic     string   `json:"topic"`
	State     string   `json:"state"`
	RateMilli int64    `json:"rate_milli"`
	Burst     int64    `json:"burst"`
	Offered   float64  `json:"offered_per_second"`
	Released  float64  `json:"released_per_second"`
	Delivered float64  `json:"delivered_per_second"`
	Backlog   uint64   `json:"backlog"`
	Depth     uint64   `json:"depth"`
	P99       p99Split `json:"p99_us"`
	SLO       string   `json:"slo"` // met, missed, undecided, or idle
	Brokers   []string `json:"brokers"`
}

// p99Split holds nil for latencies without samples.
type p99Split struct {
	Delivery   *int64 `json:"delivery"`
	Access     *int64 `json:"access"`
	Processing *int64 `json:"processing"`
	Consumer   *int64 `json:"consumer"`
}

// topAtOnce limits the concurrent calls.
const topAtOnce = 8

func (x *call) top(ctx context.Context, w io.Writer, limit int) error {
	names, more := x.args, false
	if len(names) == 0 {
		for token := ""; ; {
			r, err := x.admin.ListTopics(ctx, &srtmv1.ListTopicsRequest{PageSize: int32(limit - len(names)), PageToken: token})
			if err != nil {
				return err
			}
			for _, t := range r.GetTopics() {
				names = append(names, t.GetSpec().GetName())
			}
			token = r.GetNextPageToken()
			if more = token != ""; !more || len(names) >= limit {
				break
			}
		}
	}
	topics := make([]*srtmv1.Topic, len(names))
	var calls errgroup.Group
	calls.SetLimit(topAtOnce)
	for i, name := range names {
		calls.Go(func() (err error) {
			topics[i], err = x.topicSummary(ctx, name)
			if len(x.args) == 0 && status.Code(err) == codes.NotFound {
				return nil // deleted after the listing
			}
			return err
		})
	}
	if err := calls.Wait(); err != nil {
		return err
	}
	brokers, err := x.admin.ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
	if err != nil {
		return err
	}
	var all []activity
	missed := 0
	for _, t := range topics {
		if t != nil {
			all = append(all, activityOf(t))
			if all[len(all)-1].SLO == "missed" {
				missed++
			}
		}
	}
	slices.SortFunc(all, func(a, b activity) int {
		if (a.SLO == "missed") != (b.SLO == "missed") {
			if a.SLO == "missed" {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(b.Offered, a.Offered), cmp.Compare(a.Topic, b.Topic))
	})
	return x.cli.print(w, jsonArray(all), func() error {
		connected, mcap, allocated := 0, int64(0), int64(0)
		for _, b := range brokers.GetBrokers() {
			if b.GetConnected() {
				connected++
				mcap, allocated = mcap+b.GetMcap(), allocated+b.GetAllocated()
			}
		}
		fmt.Fprintf(w, "%s, %d outside the SLO; %d of %s connected, %d of their %d msg/s allocated\n",
			plural.Count(len(all), "topic"), missed, connected, plural.Count(len(brokers.GetBrokers()), "broker"), allocated, mcap)
		if more {
			fmt.Fprintf(w, "these are the first topics by name: see --limit, or name some\n")
		}
		fmt.Fprintln(w)
		const head = "TOPIC\tSTATE\tCONTRACT\tOFFERED/S\tRELEASED/S\tDELIVERED/S\tBACKLOG\tDEPTH\tP99\tACCESS\tPROCESSING\tCONSUMER\tSLO\tBROKERS"
		return table(w, head, all, func(a activity) []any {
			return []any{
				a.Topic, a.State, fmt.Sprintf("%s/s, %d", thousandths(a.RateMilli), a.Burst), tenths(a.Offered), tenths(a.Released), tenths(a.Delivered), a.Backlog, a.Depth,
				micros(a.P99.Delivery), micros(a.P99.Access), micros(a.P99.Processing), micros(a.P99.Consumer), a.SLO, strings.Join(a.Brokers, ","),
			}
		})
	})
}

func activityOf(t *srtmv1.Topic) activity {
	s := t.GetStatus()
	a := activity{
		Topic: t.GetSpec().GetName(), State: topics.State(t.GetState()), SLO: "idle", Brokers: []string{},
		RateMilli: t.GetSpec().GetContract().GetRateMilli(), Burst: t.GetSpec().GetContract().GetBurst(),
	}
	for _, q := range t.GetQuotas() {
		a.Brokers = append(a.Brokers, q.GetBrokerId())
	}
	for _, b := range s.GetBrokers() {
		last := b.GetLast()
		a.Offered += topics.PerSecond(last.GetOffered(), last)
		a.Released += topics.PerSecond(last.GetReleased(), last)
		a.Delivered += topics.PerSecond(last.GetDelivered(), last)
		a.Backlog, a.Depth = a.Backlog+last.GetBacklog(), a.Depth+last.GetDepth()
	}
	pooled := s.GetPooled()
	a.P99 = p99Split{p99Micros(pooled.GetDelivery()), p99Micros(pooled.GetAccess()), p99Micros(pooled.GetProcessing()), p99Micros(pooled.GetConsumer())}
	if pooled.GetDelivered()+s.GetUnaccepted() > 0 {
		a.SLO = sloState(s)
	}
	return a
}

func p99Micros(h *srtmv1.Histogram) *int64 {
	q, ok := p99Of(h)
	if !ok {
		return nil
	}
	us := q.Microseconds()
	return &us
}

func micros(us *int64) string {
	if us == nil {
		return "-"
	}
	return (time.Duration(*us) * time.Microsecond).String()
}

func tenths(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }
