package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

func topicCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "topic",
		Short: "Topics and their contracts",
		Args:  noArguments,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(topicCreateCommand(), topicListCommand(), topicDescribeCommand(), topicUpdateCommand(), topicMoveCommand(), topicDeleteCommand())
	return cmd
}

// newTopic is what `topic create` was told.
type newTopic struct {
	file        string
	rate        float64
	burst       int64
	quantile    float64
	latency     time.Duration
	overLimit   string
	policy      string
	shareRule   string
	groups      []string
	publishers  []string
	channels    []string
	idempotency string
}

func topicCreateCommand() *cobra.Command {
	var c cli
	var n newTopic
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a topic with a contract, and wait until it is active",
		Long: `create places a topic: NAME gets a contract of --rate msg/s and a burst of
--burst messages, and an SLO, by default that 99 % of its messages are delivered
within 1 ms. It returns when publishers may connect.

Publishers are declared in groups, KEY:COUNT:RATE[:BATCH], where KEY is the
correlation key of publishers that tend to send together (empty: none) and RATE
is each publisher's in msg/s; or one by one, ID:KEY:RATE[:BATCH]. A group's
publishers have the ids KEY.0, KEY.1, ... (pool.0, ... without a key).

--file reads the whole specification as JSON, the TopicSpec of the API or what srtm
topic describe --output json prints; then only --idempotency-key may be given besides.`,
		Example: `  srtm topic create sensors --rate 11000 --burst 30 --group north:500:10 --group south:500:10
  srtm topic create sensors --file sensors.json`,
		Args: n.nameOrFile,
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := n.spec(cmd, args)
			if err != nil {
				return err
			}
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				topic, err := create(ctx, conn, spec, n.idempotency, cmd.ErrOrStderr())
				if err != nil {
					return err
				}
				if c.output == formJSON {
					return writeProto(cmd.OutOrStdout(), topic)
				}
				return describe(cmd.OutOrStdout(), topic)
			})
		},
	}
	n.flags(cmd)
	cmd.Flags().StringVar(&n.idempotency, "idempotency-key", "", "`key` under which the same command may be repeated")
	c.flags(cmd)
	return cmd
}

func topicMoveCommand() *cobra.Command {
	var c cli
	var to string
	var ids []string
	cmd := &cobra.Command{
		Use:     "move NAME",
		Short:   "Move publishers of a topic to a broker",
		Long:    `move takes the publishers' part of the contract along. Nothing is lost or doubled.`,
		Example: `  srtm topic move sensors --to b2 --publisher-id north.7 --publisher-id north.8`,
		Args:    oneName,
		RunE: func(cmd *cobra.Command, args []string) error {
			if to == "" || len(ids) == 0 {
				return usagef("--to and --publisher-id are required")
			}
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				r, err := srtmv1.NewAdminServiceClient(conn).MovePublishers(ctx, &srtmv1.MovePublishersRequest{
					Topic: args[0], BrokerId: to, PublisherIds: ids,
				})
				if err != nil {
					return err
				}
				if c.output == formJSON {
					return writeProto(cmd.OutOrStdout(), r.GetTopic())
				}
				return describe(cmd.OutOrStdout(), r.GetTopic())
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "`broker` to move them to")
	cmd.Flags().StringArrayVar(&ids, "publisher-id", nil, "`id` of a publisher; may be repeated")
	c.flags(cmd)
	return cmd
}

// flags adds those that make a specification.
func (n *newTopic) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&n.file, "file", "", "JSON `file` with the specification; - for standard input")
	f.Float64Var(&n.rate, "rate", 0, "contract rate r, in `msg/s`, up to three decimals")
	f.Int64Var(&n.burst, "burst", 0, "contract burst b, in `messages`")
	f.Float64Var(&n.quantile, "slo-quantile", 0.99, "`fraction` of messages delivered within --slo-latency")
	f.DurationVar(&n.latency, "slo-latency", time.Millisecond, "delivery latency of the SLO")
	f.StringVar(&n.overLimit, "over-limit", "delay", "what becomes of messages without a token: delay or reject")
	f.StringVar(&n.policy, "policy", "srtm", "placement `policy`: srtm, maxmin, conc or loadbalance")
	f.StringVar(&n.shareRule, "share-rule", share.Default, "how shares are retuned: static, proportional, robust or sqrt")
	f.StringArrayVar(&n.groups, "group", nil, "publishers, as `KEY:COUNT:RATE[:BATCH]`; may be repeated")
	f.StringArrayVar(&n.publishers, "publisher", nil, "one publisher, as `ID:KEY:RATE[:BATCH]`; may be repeated")
	f.StringArrayVar(&n.channels, "channel", nil, "channel to create with the topic; may be repeated")
}

// nameOrFile checks arguments: one, which a file may have instead.
func (n *newTopic) nameOrFile(cmd *cobra.Command, args []string) error {
	if n.file != "" && len(args) == 0 {
		return nil
	}
	return oneName(cmd, args)
}

// spec builds the request. What the numbers mean is the loaddistributor's to
// judge; here only what cannot be sent is refused.
func (n *newTopic) spec(cmd *cobra.Command, args []string) (*srtmv1.TopicSpec, error) {
	if n.file != "" {
		spec, _, _, err := n.read(cmd, args)
		return spec, err
	}
	spec := &srtmv1.TopicSpec{
		Name: args[0],
		Contract: &srtmv1.Contract{
			RateMilli: int64(tokenbucket.PerSecond(n.rate)),
			Burst:     n.burst,
			Slo:       &srtmv1.Slo{Quantile: n.quantile, Latency: durationpb.New(n.latency)},
		},
		PlacementPolicy: n.policy,
		ShareRule:       n.shareRule,
		Channels:        n.channels,
	}
	switch n.overLimit {
	case "delay":
		spec.Contract.OverLimit = srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_DELAY
	case "reject":
		spec.Contract.OverLimit = srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT
	default:
		return nil, usagef("--over-limit %q is neither delay nor reject", n.overLimit)
	}
	var faults []error
	for _, g := range n.groups {
		group, err := parseGroup(g)
		if err != nil {
			faults = append(faults, fmt.Errorf("--group %q: %w", g, err))
		}
		spec.Groups = append(spec.Groups, group)
	}
	for _, p := range n.publishers {
		publisher, err := parsePublisher(p)
		if err != nil {
			faults = append(faults, fmt.Errorf("--publisher %q: %w", p, err))
		}
		spec.Publishers = append(spec.Publishers, publisher)
	}
	if err := errors.Join(faults...); err != nil {
		return nil, usagef("%w", err)
	}
	return spec, nil
}

// read reads --file: a specification, or a topic as describe shows it, of which text
// is the part that is one, and epoch the topic's.
func (n *newTopic) read(cmd *cobra.Command, args []string) (spec *srtmv1.TopicSpec, text json.RawMessage, epoch uint64, err error) {
	for _, name := range slices.Sorted(maps.Keys(fieldOf)) {
		if cmd.Flags().Changed(name) {
			return nil, nil, 0, usagef("--%s and --file exclude each other", name)
		}
	}
	if n.file == "-" {
		text, err = io.ReadAll(cmd.InOrStdin())
	} else {
		text, err = os.ReadFile(n.file)
	}
	if err != nil {
		return nil, nil, 0, err
	}
	var topic srtmv1.Topic
	var whole struct{ Spec json.RawMessage }
	if json.Unmarshal(text, &whole) == nil && whole.Spec != nil {
		err, text = protojson.Unmarshal(text, &topic), whole.Spec
	} else {
		topic.Spec = &srtmv1.TopicSpec{}
		err = protojson.Unmarshal(text, topic.Spec)
	}
	if err == nil && topic.Spec == nil {
		err = errors.New("the spec is null")
	}
	if err != nil {
		return nil, nil, 0, fmt.Errorf("%s: %w", n.file, err)
	}
	spec = topic.Spec
	if len(args) == 1 {
		if spec.Name != "" && spec.Name != args[0] {
			return nil, nil, 0, usagef("the topic is %q on the command line and %q in %s", args[0], spec.Name, n.file)
		}
		spec.Name = args[0]
	}
	return spec, text, topic.Epoch, nil
}

func parseGroup(s string) (*srtmv1.PublisherGroup, error) {
	parts := strings.Split(s, ":")
	if len(parts) != 3 && len(parts) != 4 {
		return nil, errors.New("want KEY:COUNT:RATE or KEY:COUNT:RATE:BATCH")
	}
	count, err := strconv.ParseInt(parts[1], 10, 32)
	if err != nil {
		return nil, fmt.Errorf("count %q is not a number of publishers", parts[1])
	}
	rate, batch, err := rateAndBatch(parts[2:])
	if err != nil {
		return nil, err
	}
	return &srtmv1.PublisherGroup{Key: parts[0], Count: int32(count), Rate: rate, Batch: batch}, nil
}

func parsePublisher(s string) (*srtmv1.Publisher, error) {
	parts := strings.Split(s, ":")
	if len(parts) != 3 && len(parts) != 4 {
		return nil, errors.New("want ID:KEY:RATE or ID:KEY:RATE:BATCH")
	}
	rate, batch, err := rateAndBatch(parts[2:])
	if err != nil {
		return nil, err
	}
	return &srtmv1.Publisher{Id: parts[0], CorrelationKey: parts[1], Rate: rate, Batch: batch}, nil
}

func rateAndBatch(parts []string) (rate float64, batch int32, err error) {
	if rate, err = strconv.ParseFloat(parts[0], 64); err != nil {
		return 0, 0, fmt.Errorf("rate %q is not a number of messages per second", parts[0])
	}
	if len(parts) == 2 {
		b, err := strconv.ParseInt(parts[1], 10, 32)
		if err != nil {
			return 0, 0, fmt.Errorf("batch %q is not a number of messages", parts[1])
		}
		batch = int32(b)
	}
	return rate, batch, nil
}

// create follows a creation to its end; what happens on the way goes to
// progress.
func create(ctx context.Context, conn *grpc.ClientConn, spec *srtmv1.TopicSpec, key string, progress io.Writer) (*srtmv1.Topic, error) {
	stream, err := srtmv1.NewAdminServiceClient(conn).CreateTopic(ctx, &srtmv1.CreateTopicRequest{Spec: spec, IdempotencyKey: key})
	if err != nil {
		return nil, err
	}
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, errors.New("the loaddistributor ended the call without the topic")
		}
		if err != nil {
			return nil, err
		}
		if r.GetTopic() != nil {
			return r.GetTopic(), nil
		}
		if r.GetMessage() != "" {
			fmt.Fprintf(progress, "%s: %s\n", stateName(r.GetState()), r.GetMessage())
		}
	}
}

func topicListCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the topics, by name",
		Args:  noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				topics, err := listTopics(ctx, conn)
				if err != nil {
					return err
				}
				if c.output == formJSON {
					return writeProtos(cmd.OutOrStdout(), topics)
				}
				var rows [][]string
				for _, t := range topics {
					contract := t.GetSpec().GetContract()
					rows = append(rows, []string{
						t.GetSpec().GetName(), stateName(t.GetState()), rateText(contract.GetRateMilli()),
						strconv.FormatInt(contract.GetBurst(), 10), sloText(contract.GetSlo()),
						strconv.Itoa(len(t.GetQuotas())), t.GetReason(),
					})
				}
				return table(cmd.OutOrStdout(), []string{"TOPIC", "STATE", "RATE", "BURST", "SLO", "BROKERS", "REASON"}, rows)
			})
		},
	}
	c.flags(cmd)
	return cmd
}

func listTopics(ctx context.Context, conn *grpc.ClientConn) ([]*srtmv1.Topic, error) {
	var topics []*srtmv1.Topic
	for token := ""; ; {
		r, err := srtmv1.NewAdminServiceClient(conn).ListTopics(ctx, &srtmv1.ListTopicsRequest{PageSize: 1000, PageToken: token})
		if err != nil {
			return nil, err
		}
		topics = append(topics, r.GetTopics()...)
		if token = r.GetNextPageToken(); token == "" {
			return topics, nil
		}
	}
}

func topicDescribeCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "describe NAME",
		Short: "Show a topic's contract, placement and present figures",
		Args:  oneName,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				r, err := srtmv1.NewAdminServiceClient(conn).GetTopic(ctx, &srtmv1.GetTopicRequest{Name: args[0], OmitPublishers: c.output == formTable})
				if err != nil {
					return err
				}
				if c.output == formJSON {
					return writeProto(cmd.OutOrStdout(), r.GetTopic())
				}
				return describe(cmd.OutOrStdout(), r.GetTopic())
			})
		},
	}
	c.flags(cmd)
	return cmd
}

func topicDeleteCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "delete NAME",
		Short: "Delete a topic with the messages it still holds",
		Args:  oneName,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				_, err := srtmv1.NewAdminServiceClient(conn).DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: args[0]})
				if err != nil {
					return err
				}
				if c.output == formJSON {
					return writeJSON(cmd.OutOrStdout(), map[string]string{"deleted": args[0]})
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "topic %s is deleted\n", args[0])
				return err
			})
		},
	}
	c.flags(cmd)
	return cmd
}

// describe prints a topic for people.
func describe(w io.Writer, t *srtmv1.Topic) error {
	spec, status := t.GetSpec(), t.GetStatus()
	contract := spec.GetContract()
	policy, rule := spec.GetPlacementPolicy(), spec.GetShareRule()
	if policy == "" {
		policy = "srtm"
	}
	if rule == "" {
		rule = share.Default
	}
	fmt.Fprintf(w, "topic     %s\nstate     %s", spec.GetName(), stateName(t.GetState()))
	if t.GetReason() != "" {
		fmt.Fprintf(w, " (%s)", t.GetReason())
	}
	fmt.Fprintf(w, "\ncontract  r %s msg/s, b %d, SLO %s\nplacement %s, epoch %d, shares %s\n",
		rateText(contract.GetRateMilli()), contract.GetBurst(), sloText(contract.GetSlo()), policy, t.GetEpoch(), rule)
	if n := status.GetPooled().GetDelivered() + status.GetUnaccepted(); n > 0 {
		verdict := "undecided, too few messages or beyond the contract"
		if status.SloMet != nil {
			verdict = map[bool]string{true: "met", false: "missed"}[status.GetSloMet()]
		}
		late := fmt.Sprintf("later than %v", contract.GetSlo().GetLatency().AsDuration())
		if lost := status.GetUnaccepted(); lost > 0 {
			late += fmt.Sprintf(", or not accepted (%d)", lost)
		}
		fmt.Fprintf(w, "SLO       %s: %.4f %% of %d messages in %v were %s\n", verdict, 100*status.GetExceedFraction(), n, status.GetWindow().AsDuration(), late)
	}
	if status.GetMoving() != "" {
		fmt.Fprintf(w, "moving    waits, %s\n", status.GetMoving())
	}
	if status.GetFitting() != "" {
		fmt.Fprintf(w, "fitting   %s\n", status.GetFitting())
	}
	if status != nil && status.P99AccessFraction != nil {
		fmt.Fprintf(w, "p99       %s of it is access delay (mean over the slowest 1 %%, all brokers)\n", percentText(status.GetP99AccessFraction()))
	}
	fmt.Fprintln(w)
	figures := map[string]*srtmv1.BrokerTopicStatus{}
	for _, b := range status.GetBrokers() {
		figures[b.GetBrokerId()] = b
	}
	var rows [][]string
	for _, q := range t.GetQuotas() {
		b := figures[q.GetBrokerId()]
		share := q.GetShare()
		if b.GetShare() != nil {
			share = b.GetShare()
		}
		window := b.GetWindow()
		ofItAccess := "-"
		if b != nil && b.P99AccessFraction != nil {
			ofItAccess = percentText(b.GetP99AccessFraction())
		}
		rows = append(rows, []string{
			q.GetBrokerId(), strconv.FormatInt(q.GetRate(), 10), strconv.FormatUint(uint64(q.GetPublishers()), 10),
			rateText(share.GetRateMilli()), strconv.FormatInt(share.GetBurst(), 10),
			perSecond(window.GetOffered(), window.GetInterval()), perSecond(window.GetDelivered(), window.GetInterval()),
			p99(window.GetAccess()), p99(window.GetProcessing()), p99(window.GetDelivery()), ofItAccess, p99(window.GetConsumer()),
		})
	}
	return table(w, []string{"BROKER", "QUOTA", "PUBLISHERS", "R_L", "B_L", "IN/S", "OUT/S", "ACCESS P99", "PROCESSING P99", "DELIVERY P99", "OF IT ACCESS", "CONSUMER P99"}, rows)
}

func stateName(s srtmv1.TopicState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "TOPIC_STATE_"))
}

func rateText(milli int64) string {
	return tokenbucket.Rate(milli).Text()
}

func sloText(s *srtmv1.Slo) string {
	return fmt.Sprintf("%.6g %% within %v", 100*s.GetQuantile(), s.GetLatency().AsDuration())
}

func perSecond(n uint64, interval *durationpb.Duration) string {
	d := interval.AsDuration().Seconds()
	if d <= 0 {
		return "-"
	}
	return strconv.FormatFloat(float64(n)/d, 'f', 1, 64)
}

func percentText(fraction float64) string {
	return strconv.FormatFloat(100*fraction, 'f', 1, 64) + " %"
}

func p99(h *srtmv1.Histogram) string {
	l, err := obs.LatencyFromProto(h)
	if err != nil || l.Count() == 0 {
		return "-"
	}
	return l.Quantile(0.99).String()
}
