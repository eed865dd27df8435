package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

func topicCommand() *cobra.Command {
	return parent("topic", "Topics and their contracts", "",
		topicCreateCommand(), topicListCommand(), topicDescribeCommand(), topicWatchCommand(), topicUpdateCommand(), topicMoveCommand(), topicPaceCommand(), topicProfileCommand(), topicDeleteCommand())
}

// newTopic holds the flags of `topic create`. Some flags set fields of said directly;
// spec converts the others.
type newTopic struct {
	file                          string
	given                         *srtmv1.TopicSpec
	rate, autoRate                float64
	latency                       time.Duration
	overLimit, pacing, durability string
	groups, publishers            []string
	autoBurst                     string
	ttl                           time.Duration
	expiry                        srtmv1.Expiry
	channelExpiry                 []string
	idempotency                   string
	suggest                       string
	wanted                        wanted
}

func topicCreateCommand() *cobra.Command {
	var n newTopic
	var spec *srtmv1.TopicSpec
	cmd := leaf(&cobra.Command{
		Use:   "create NAME",
		Short: "Create a topic with a contract, and wait until it is active",
		Long: `create places a topic: NAME gets a contract of --rate msg/s and a burst of
--burst messages, and an SLO, by default that 99 % of its messages are delivered
within 100 ms. It returns when publishers may connect.

Publishers are declared in groups, KEY:COUNT:RATE[:BATCH[:WEIGHT]], where KEY is the
correlation key of publishers that tend to send together (empty: none), RATE is each
publisher's in msg/s and WEIGHT, 1 to 255, its part where the topic is paced; or one by one,
ID:KEY:RATE[:BATCH]. A group's publishers have the ids KEY.0, KEY.1, ... (pool.0, ... without
a key).

Without publishers the topic is open: a client that publishes to one of its brokers is a
publisher. Who they are, what they send and which of them send together is learned from
what they do, and describe shows it. With --auto-rate-limit and --auto-burst its contract
follows what is measured, too, within what they say; until a minute of traffic is known it
is --rate and --burst, or without them the limits. Without any of the four, it begins with
--default-topic-rate and --default-topic-burst of the loaddistributor (1000 msg/s and 1000
messages), and the limits are half of the largest broker's capacity, and a second's messages
of that.

--file reads the whole specification as JSON, the TopicSpec of the API or what srtm
topic describe --output json prints; then only --idempotency-key may be given besides.`,
		Example: `  srtm topic create sensors --rate 11000 --burst 30 --group north:500:10 --group south:500:10
  srtm topic create sensors --rate 11000 --burst 30
  srtm topic create sensors --file sensors.json`,
		Args: n.nameOrFile,
		PreRunE: func(cmd *cobra.Command, args []string) (err error) {
			if n.suggest != "" && (cmd.Flags().Changed("rate") || cmd.Flags().Changed("burst") || n.file != "") {
				return usagef("--suggest goes without --rate, --burst and --file")
			}
			spec, err = n.spec(cmd, args)
			return err
		},
	}, func(x *call) error {
		if n.suggest != "" {
			if err := x.suggest(&n, spec); err != nil {
				return err
			}
		}
		request := &srtmv1.CreateTopicRequest{Spec: spec, IdempotencyKey: n.idempotency}
		return x.describe(topics.Create(x.ctx, x.admin, request, func(r *srtmv1.CreateTopicResponse) {
			if r.GetMessage() != "" {
				fmt.Fprintf(x.cmd.ErrOrStderr(), "%s: %s\n", topics.State(r.GetState()), r.GetMessage())
			}
		}))
	})
	n.flags(cmd)
	cmd.Flags().StringVar(&n.suggest, "suggest", "", "take r and b as srtm topic profile proposes them, of a trace `file` (an arrival time in seconds a line, perhaps a comma and the publisher), or else of the topic of that name")
	n.wanted.flags(cmd, "with --suggest: ")
	cmd.Flags().StringVar(&n.idempotency, "idempotency-key", "", "`key` under which the same command may be repeated")
	return cmd
}

func (x *call) describe(t *srtmv1.Topic, err error) error {
	return x.show(t, err, func() error { return describe(x.out, t) })
}

func topicMoveCommand() *cobra.Command {
	var r srtmv1.MovePublishersRequest
	var group string
	cmd := leaf(&cobra.Command{
		Use:   "move NAME",
		Short: "Move publishers of a topic to a broker",
		Long: `move takes the publishers' part of the contract along. Nothing is lost or doubled.

Name the publishers with --publisher-id, or select them: --all, --group, --from, or --group
and --from together.`,
		Example: `  srtm topic move sensors --to b2 --publisher-id north.7 --publisher-id north.8
  srtm topic move sensors --to b2 --group north --from b1
  srtm topic move sensors --to b2 --all`,
		Args: oneName,
		PreRunE: func(cmd *cobra.Command, args []string) error {
			r.Topic = args[0]
			if cmd.Flags().Changed("group") {
				r.Group = &group
			}
			var f faults.List
			f.If(r.BrokerId == "", "--to is missing: it names the broker (for example --to=b2)")
			selected := r.All || r.Group != nil || r.FromBrokerId != ""
			f.If(!selected && len(r.PublisherIds) == 0, "which publishers? want --all, --group, --from or --publisher-id (for example --publisher-id=north.7)")
			f.If(selected && len(r.PublisherIds) > 0, "--publisher-id goes with none of --all, --group and --from")
			f.If(r.All && (r.Group != nil || r.FromBrokerId != ""), "--all goes with neither --group nor --from")
			if err := f.Err(); err != nil {
				return usagef("%w", err)
			}
			return nil
		},
	}, func(x *call) error {
		moved, err := x.admin.MovePublishers(x.ctx, &r)
		return x.describe(moved.GetTopic(), err)
	})
	cmd.Flags().StringVar(&r.BrokerId, "to", "", "`broker` to move them to")
	cmd.Flags().BoolVar(&r.All, "all", false, "move all publishers of the topic")
	cmd.Flags().StringVar(&group, "group", "", "move the publishers with this correlation `key`; \"\": those without one")
	cmd.Flags().StringVar(&r.FromBrokerId, "from", "", "move the publishers that this `broker` has")
	cmd.Flags().StringArrayVar(&r.PublisherIds, "publisher-id", nil, "`id` of a publisher; may be repeated")
	return cmd
}

// named returns the value of an enumeration for a flag: the name in the .proto without
// the prefix, in lower case. "" is the unspecified value.
func named[E ~int32](values map[string]int32, prefix, name string) (value E, known bool) {
	if name == "" {
		return 0, true
	}
	n := values[prefix+strings.ToUpper(name)]
	return E(n), n != 0 && name == strings.ToLower(name)
}

func pacingMode(name string) (srtmv1.PacingMode, bool) {
	return named[srtmv1.PacingMode](srtmv1.PacingMode_value, "PACING_MODE_", name)
}

func pacingText(m srtmv1.PacingMode) string {
	if m == srtmv1.PacingMode_PACING_MODE_UNSPECIFIED {
		return "as each broker's --pacing"
	}
	return strings.ToLower(strings.TrimPrefix(m.String(), "PACING_MODE_"))
}

func topicPaceCommand() *cobra.Command {
	var mode string
	cmd := leaf(&cobra.Command{
		Use:   "pace NAME",
		Short: "Show or set what is done about publishers that send more than their part",
		Long: `pace shows how the topic's publishers are paced and what its groups weigh; with --mode
it sets that. The rates that they are advised now, each broker has in /stats?format=json.`,
		Example: `  srtm topic pace sensors --mode police`,
		Args:    oneName,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if _, known := pacingMode(mode); !known {
				return usagef("--mode %q is neither off, advise nor police", mode)
			}
			return nil
		},
	}, func(x *call) error {
		name, topic, err := x.args[0], (*srtmv1.Topic)(nil), error(nil)
		if x.cmd.Flags().Changed("mode") {
			var r *srtmv1.UpdateTopicResponse
			value, _ := pacingMode(mode)
			r, err = x.admin.UpdateTopic(x.ctx, &srtmv1.UpdateTopicRequest{
				Spec:       &srtmv1.TopicSpec{Name: name, Pacing: value},
				UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"pacing"}},
			})
			topic = r.GetTopic()
		} else {
			topic, err = x.topicSummary(x.ctx, name)
		}
		return x.show(topic.GetSpec(), err, func() error {
			fmt.Fprintf(x.out, "topic     %s\npacing    %s\n\n", name, pacingText(topic.GetSpec().GetPacing()))
			return table(x.out, "GROUP\tPUBLISHERS\tWEIGHT", topic.GetSpec().GetGroups(), func(g *srtmv1.PublisherGroup) []any {
				return []any{cmp.Or(g.GetKey(), "pool"), g.GetCount(), max(g.GetWeight(), 1)}
			})
		})
	})
	cmd.Flags().StringVar(&mode, "mode", "", "`mode` to set: off, advise or police; empty: as each broker's --pacing")
	return cmd
}

func (n *newTopic) flags(cmd *cobra.Command) {
	contract := &srtmv1.Contract{Slo: &srtmv1.Slo{}}
	n.given = &srtmv1.TopicSpec{Contract: contract}
	f := cmd.Flags()
	f.StringVar(&n.file, "file", "", "JSON `file` with the specification; - for standard input")
	f.Float64Var(&n.rate, "rate", 0, "contract rate r, in `msg/s`, up to three decimals")
	f.Int64Var(&contract.Burst, "burst", 0, "contract burst b, in `messages`")
	f.StringVar(&n.autoBurst, "auto-burst", "", "of an open topic: b follows what is measured, within `MIN:MAX` messages")
	f.Float64Var(&n.autoRate, "auto-rate-limit", 0, "of an open topic: r follows what is measured, up to so many `msg/s`")
	f.Float64Var(&contract.Slo.Quantile, "slo-quantile", topics.DefaultQuantile, "`fraction` of messages delivered within --slo-latency")
	f.DurationVar(&n.latency, "slo-latency", topics.DefaultLatency, "delivery latency of the SLO, 100us to 1m")
	f.StringVar(&n.overLimit, "over-limit", "delay", "what becomes of messages without a token: delay or reject")
	f.StringVar(&n.given.PlacementPolicy, "policy", "srtm", "placement `policy`: srtm, maxmin, conc or loadbalance")
	f.StringVar(&n.given.ShareRule, "share-rule", share.Default, "how shares are retuned: static, proportional, robust or sqrt")
	f.StringVar(&n.durability, "durability", "", "what an OK of a broker is worth, which must be the brokers' --durability: memory, fsync or replicated (default the brokers'); it cannot be changed")
	f.StringVar(&n.pacing, "pacing", "", "what is done about publishers that send more than their part: off, advise or police (default as nsqd's --pacing); without a value: advise")
	f.Lookup("pacing").NoOptDefVal = "advise"
	f.DurationVar(&n.ttl, "ttl", 0, "discard messages older than this `time`, without a token; 0: never")
	f.Uint32Var(&n.expiry.MaxAttempts, "max-attempts", 0, "give a message up after so many `deliveries` in a channel; 0: never")
	f.StringVar(&n.expiry.DeadLetterTopic, "dead-letter", "", "`topic` that gets messages after --max-attempts; without one they are discarded")
	f.StringArrayVar(&n.channelExpiry, "channel-expiry", nil, "settings of one channel, as `"+topics.ChannelExpiryForm+"`; may be repeated")
	f.StringArrayVar(&n.groups, "group", nil, "publishers, as `"+topics.GroupForm+"`; may be repeated")
	f.StringArrayVar(&n.publishers, "publisher", nil, "one publisher, as `"+topics.PublisherForm+"`; may be repeated")
	f.StringArrayVar(&n.given.Channels, "channel", nil, "channel to create with the topic; may be repeated")
}

// nameOrFile checks the arguments: one topic name, optional with --file.
func (n *newTopic) nameOrFile(cmd *cobra.Command, args []string) error {
	if n.file != "" && len(args) == 0 {
		return nil
	}
	return oneName(cmd, args)
}

// spec builds the request. It refuses only values that cannot be sent; the
// loaddistributor judges the numbers.
func (n *newTopic) spec(cmd *cobra.Command, args []string) (*srtmv1.TopicSpec, error) {
	if n.file != "" {
		spec, _, _, err := n.read(cmd, args)
		return spec, err
	}
	spec := n.given
	spec.Name = args[0]
	spec.Contract.RateMilli, spec.Contract.Slo.Latency = int64(tokenbucket.PerSecond(n.rate)), durationpb.New(n.latency)
	var known bool
	if spec.Contract.OverLimit, known = named[srtmv1.OverLimitPolicy](srtmv1.OverLimitPolicy_value, "OVER_LIMIT_POLICY_", n.overLimit); !known || n.overLimit == "" {
		return nil, usagef("--over-limit %q is neither delay nor reject", n.overLimit)
	}
	if spec.Pacing, known = pacingMode(n.pacing); !known {
		return nil, usagef("--pacing %q is neither off, advise nor police", n.pacing)
	}
	if spec.Durability, known = named[srtmv1.Durability](srtmv1.Durability_value, "DURABILITY_", n.durability); !known {
		return nil, usagef("--durability %q is none of memory, fsync, replicated", n.durability)
	}
	if n.autoBurst != "" || n.autoRate != 0 {
		spec.Auto = &srtmv1.AutoContract{MaxRateMilli: int64(tokenbucket.PerSecond(n.autoRate))}
		if n.autoBurst != "" {
			minimum, maximum, _ := strings.Cut(n.autoBurst, ":")
			var errs [2]error
			spec.Auto.MinBurst, errs[0] = strconv.ParseInt(minimum, 10, 64)
			spec.Auto.MaxBurst, errs[1] = strconv.ParseInt(maximum, 10, 64)
			if errors.Join(errs[:]...) != nil {
				return nil, usagef("--auto-burst %q is not MIN:MAX", n.autoBurst)
			}
		}
	}
	if n.ttl != 0 {
		n.expiry.Ttl = durationpb.New(n.ttl)
	}
	if n.ttl != 0 || n.expiry.MaxAttempts != 0 || n.expiry.DeadLetterTopic != "" {
		spec.Expiry = &n.expiry
	}
	var faults, wrong []error
	spec.ChannelExpiry, wrong = topics.ParseChannelExpiry(n.channelExpiry)
	for _, err := range wrong {
		faults = append(faults, fmt.Errorf("--channel-expiry %w", err))
	}
	spec.Groups, faults = parseAll("group", n.groups, faults, topics.ParseGroup)
	spec.Publishers, faults = parseAll("publisher", n.publishers, faults, topics.ParsePublisher)
	if err := errors.Join(faults...); err != nil {
		return nil, usagef("%w", err)
	}
	return spec, nil
}

// parseAll parses all values of a flag, and appends errors to faults.
func parseAll[T any](flag string, values []string, faults []error, parse func(string) (*T, error)) ([]*T, []error) {
	var all []*T
	for _, s := range values {
		v, err := parse(s)
		if err != nil {
			faults = append(faults, fmt.Errorf("--%s %q: %w", flag, s, err))
		}
		all = append(all, v)
	}
	return all, faults
}

// read reads --file: a specification, or a topic as describe prints it. text is the JSON
// of the specification, and epoch the topic's epoch.
func (n *newTopic) read(cmd *cobra.Command, args []string) (spec *srtmv1.TopicSpec, text json.RawMessage, epoch uint64, err error) {
	for _, name := range slices.Sorted(maps.Keys(fieldOf)) {
		if cmd.Flags().Changed(name) {
			return nil, nil, 0, usagef("--%s and --file exclude each other", name)
		}
	}
	if text, err = readFile(cmd, n.file); err != nil {
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

func topicListCommand() *cobra.Command {
	return leaf(&cobra.Command{Use: "list", Short: "List the topics, by name"}, func(x *call) error {
		var matching []*srtmv1.Topic
		err := topics.Pages(func(token string) (string, error) {
			r, err := x.admin.ListTopics(x.ctx, &srtmv1.ListTopicsRequest{PageSize: 1000, PageToken: token})
			matching = append(matching, r.GetTopics()...)
			return r.GetNextPageToken(), err
		})
		return list(x, matching, err, "TOPIC\tSTATE\tRATE\tBURST\tSLO\tBROKERS\tREASON", func(t *srtmv1.Topic) []any {
			c := t.GetSpec().GetContract()
			return []any{t.GetSpec().GetName(), topics.State(t.GetState()), thousandths(c.GetRateMilli()), c.GetBurst(), topics.SLO(c.GetSlo()), len(t.GetQuotas()), t.GetReason()}
		})
	})
}

// topicSummary returns a topic without its publishers, which may be many.
func (x *call) topicSummary(ctx context.Context, name string) (*srtmv1.Topic, error) {
	r, err := x.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: name, OmitPublishers: true})
	return r.GetTopic(), err
}

// topic returns a topic with all its publishers, page by page.
func (x *call) topic(name string) (all *srtmv1.Topic, err error) {
	err = topics.Pages(func(token string) (string, error) {
		r, err := x.admin.GetTopic(x.ctx, &srtmv1.GetTopicRequest{Name: name, PageSize: 10_000, PageToken: token})
		if all == nil {
			all = r.GetTopic()
		} else {
			all.Spec.Publishers = append(all.Spec.Publishers, r.GetTopic().GetSpec().GetPublishers()...)
		}
		return r.GetNextPageToken(), err
	})
	return all, err
}

func topicDescribeCommand() *cobra.Command {
	return leaf(&cobra.Command{Use: "describe NAME", Short: "Show a topic's contract, placement and current stats", Args: oneName}, func(x *call) error {
		if x.cli.output == formTable {
			return x.describe(x.topicSummary(x.ctx, x.args[0]))
		}
		return x.describe(x.topic(x.args[0]))
	})
}

func topicDeleteCommand() *cobra.Command {
	return leaf(&cobra.Command{Use: "delete NAME", Short: "Delete a topic with the messages it still holds", Args: oneName}, func(x *call) error {
		r, err := x.admin.DeleteTopic(x.ctx, &srtmv1.DeleteTopicRequest{Name: x.args[0]})
		result, text := map[string]any{"deleted": x.args[0]}, ""
		if l := r.GetLowering(); l != nil {
			lowering, err := encode(l)
			if err != nil {
				return err
			}
			result["lowering"] = lowering
			text = "its contract may still be in use, and no topic of the name can be created before that ends: " + topics.Lowering(l) + "\n"
		}
		return x.print(result, err, "topic %s is deleted\n%s", x.args[0], text)
	})
}

func describe(w io.Writer, t *srtmv1.Topic) error {
	spec, status := t.GetSpec(), t.GetStatus()
	contract := spec.GetContract()
	policy, rule := cmp.Or(spec.GetPlacementPolicy(), "srtm"), cmp.Or(spec.GetShareRule(), share.Default)
	fmt.Fprintf(w, "topic     %s\nstate     %s", spec.GetName(), topics.State(t.GetState()))
	if t.GetReason() != "" {
		fmt.Fprintf(w, " (%s)", t.GetReason())
	}
	fmt.Fprintf(w, "\ncontract  r %s msg/s, b %d, SLO %s\nplacement %s, epoch %d, shares %s\n",
		thousandths(contract.GetRateMilli()), contract.GetBurst(), topics.SLO(contract.GetSlo()), policy, t.GetEpoch(), rule)
	if d := spec.GetDurability(); d != srtmv1.Durability_DURABILITY_UNSPECIFIED {
		fmt.Fprintf(w, "durable   %s\n", strings.ToLower(strings.TrimPrefix(d.String(), "DURABILITY_")))
	}
	describeExpiry(w, spec)
	if n := status.GetPooled().GetDelivered() + status.GetUnaccepted(); n > 0 {
		verdict := sloState(status)
		if status.SloMet == nil {
			verdict += ", too few messages or beyond the contract"
		}
		lateText := fmt.Sprintf("later than %v", contract.GetSlo().GetLatency().AsDuration())
		if lost := status.GetUnaccepted(); lost > 0 {
			lateText += fmt.Sprintf(", or not accepted (%d)", lost)
		}
		fmt.Fprintf(w, "SLO       %s: %.4f %% of %s in %v were %s\n", verdict, 100*status.GetExceedFraction(), plural.Count(n, "message"), status.GetWindow().AsDuration(), lateText)
	}
	if a := spec.GetAuto(); a != nil {
		state := "it is being measured, and provisional"
		if a.GetMeasured() {
			state = "as measured"
		}
		var what []string
		if r := a.GetMaxRateMilli(); r > 0 {
			what = append(what, "r up to "+thousandths(r)+" msg/s")
		}
		if b := a.GetMaxBurst(); b > 0 {
			what = append(what, fmt.Sprintf("b %d to %d", max(1, a.GetMinBurst()), b))
		}
		fmt.Fprintf(w, "follows   %s; %s\n", strings.Join(what, ", "), state)
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
	byBroker := map[string]*srtmv1.BrokerTopicStatus{}
	for _, b := range status.GetBrokers() {
		byBroker[b.GetBrokerId()] = b
	}
	const head = "BROKER\tQUOTA\tPUBLISHERS\tR_L\tB_L\tIN/S\tOUT/S\tACCESS P99\tPROCESSING P99\tDELIVERY P99\tOF IT ACCESS\tCONSUMER P99"
	err := table(w, head, t.GetQuotas(), func(q *srtmv1.BrokerQuota) []any {
		b := byBroker[q.GetBrokerId()]
		share := cmp.Or(b.GetShare(), q.GetShare())
		window := b.GetWindow()
		ofItAccess := "-"
		if b != nil && b.P99AccessFraction != nil {
			ofItAccess = percentText(b.GetP99AccessFraction())
		}
		return []any{
			q.GetBrokerId(), q.GetRate(), q.GetPublishers(), thousandths(share.GetRateMilli()), share.GetBurst(),
			perSecond(window.GetOffered(), window), perSecond(window.GetDelivered(), window),
			p99(window.GetAccess()), p99(window.GetProcessing()), p99(window.GetDelivery()), ofItAccess, p99(window.GetConsumer()),
		}
	})
	if err == nil && len(status.GetMoves()) > 0 {
		fmt.Fprintln(w)
		err = table(w, "MOVED\tPUBLISHER\tFROM\tTO\tREASON\tDETAILS\tBY", status.GetMoves()[:min(len(status.GetMoves()), 10)], func(m *srtmv1.PublisherMove) []any {
			return []any{
				m.GetTime().AsTime().Format(time.RFC3339), m.GetPublisherId(), cmp.Or(m.GetFrom(), "-"), cmp.Or(m.GetTo(), "-"),
				topics.MoveReason(m.GetReason()), m.GetWhy(), cmp.Or(m.GetBy(), "loaddistributor"),
			}
		})
	}
	if err != nil || t.GetLearned() == nil {
		return err
	}
	return describeLearned(w, t.GetLearned())
}

func describeLearned(w io.Writer, l *srtmv1.Learned) error {
	fmt.Fprintf(w, "\nopen: %s learned", plural.Count(l.GetCount(), "publisher"))
	if shown := len(l.GetPublishers()); shown < int(l.GetCount()) {
		fmt.Fprintf(w, ", the %d of the highest rates shown", shown)
	}
	fmt.Fprintf(w, "; others send %.1f msg/s\n", l.GetOthersRate())
	for _, note := range l.GetNotes() {
		fmt.Fprintf(w, "note: %s\n", note)
	}
	err := table(w, "PUBLISHER\tKEY\tMSG/S\tPLACED AS\tSINCE\tBROKER\tSENDS TO\tTHROUGH", l.GetPublishers(), func(p *srtmv1.LearnedPublisher) []any {
		return []any{
			p.GetId(), cmp.Or(p.GetCorrelationKey(), "-"), tenths(p.GetRate()), tenths(p.GetPlacedRate()),
			p.GetSince().AsTime().Format("2006-01-02 15:04:05 UTC"), p.GetBrokerId(), cmp.Or(p.GetSendsTo(), "-"), cmp.Or(p.GetForwarder(), "-"),
		}
	})
	if err != nil || len(l.GetGroups()) == 0 {
		return err
	}
	fmt.Fprintln(w)
	return table(w, "KEY\tPUBLISHERS\tFIRED TOGETHER\tBY CHANCE\tWITHIN", l.GetGroups(), func(g *srtmv1.LearnedGroup) []any {
		joint, firings, expected, width := uint32(0), uint32(0), 0.0, time.Duration(0)
		for _, m := range g.GetMembers() {
			joint, firings, expected = joint+m.GetJoint(), firings+m.GetFirings(), expected+m.GetExpected()
			width = max(width, m.GetWidth().AsDuration())
		}
		return []any{g.GetKey(), g.GetCount(), fmt.Sprintf("%d of %d", joint, firings), tenths(expected), width}
	})
}

func perSecond(n uint64, stats *srtmv1.TopicStats) string {
	if stats.GetInterval().AsDuration() <= 0 {
		return "-"
	}
	return tenths(topics.PerSecond(n, stats))
}

func percentText(fraction float64) string {
	return tenths(100*fraction) + " %"
}

func sloState(s *srtmv1.TopicStatus) string {
	if s.SloMet == nil {
		return "undecided"
	}
	return map[bool]string{true: "met", false: "missed"}[s.GetSloMet()]
}

func p99(h *srtmv1.Histogram) string {
	if d, exists := p99Of(h); exists {
		return d.String()
	}
	return "-"
}

func p99Of(h *srtmv1.Histogram) (d time.Duration, exists bool) {
	l, err := obs.LatencyFromProto(h)
	if err != nil || l.Count() == 0 {
		return 0, false
	}
	return l.Quantile(0.99), true
}
