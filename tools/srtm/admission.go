package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/refill"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/topics"
)

func admissionCommand() *cobra.Command {
	rules := parent("rule", "What keys may do", `rule edits the rules by which admission decides. A key has a bucket of so many
credits (--capacity), refilled at a rate (--refill, credits per second); a
request takes one, or its cost. A key that ends in "*" is a default: it stands
for each key that begins so and has no rule of its own.`,
		ruleSetCommand(), ruleGetCommand(), ruleListCommand(), ruleDeleteCommand(), ruleImportCommand())
	return parent("admission", "Rules of the admission service, and what it would say", "", rules, admissionAskCommand(),
		parent("partition", "Which server decides for which keys", "", partitionListCommand(), partitionMoveCommand()))
}

// admissionLeaf is leaf for the admission service.
func admissionLeaf(cmd *cobra.Command, do func(*call, srtmv1.AdmissionAdminClient) error) *cobra.Command {
	c := &cli{}
	c.flagsTo(cmd, "admission", "127.0.0.1", service.AdmissionPort, "gRPC `host:port` of the admission", patience)
	return c.completes(cmd, func(x *call) error { return do(x, srtmv1.NewAdmissionAdminClient(x.conn)) })
}

var oneKey = between(1, 1, "one key")

func ruleSetCommand() *cobra.Command {
	var rate string
	var r srtmv1.AdmissionRule
	var prefix string
	cmd := admissionLeaf(&cobra.Command{
		Use:   "set KEY --refill CREDITS[/PERIOD] --capacity CREDITS",
		Short: "Add or replace a rule",
		Example: `  srtm admission rule set user/17 --refill 100 --capacity 10
  srtm admission rule set 'ip/*' --refill 5 --capacity 20     # each address by itself
  srtm admission rule set 'free/*' --refill 100/day --capacity 100
  srtm admission rule set user/18                             # denied altogether`,
		Args: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("default") && len(args) == 0 {
				return nil
			}
			return oneKey(cmd, args)
		},
		PreRunE: func(*cobra.Command, []string) error {
			parsed, err := refill.Parse(rate)
			if err != nil {
				return usagef("--refill: %w", err)
			}
			r.RefillMilli, r.RefillPeriodS = parsed.Milli, parsed.Seconds
			return nil
		},
	}, func(x *call, a srtmv1.AdmissionAdminClient) error {
		keys := x.args
		if x.cmd.Flags().Changed("default") {
			keys = append(keys, prefix+"*")
		}
		var request srtmv1.SetRulesRequest
		for _, key := range keys {
			rule := proto.CloneOf(&r)
			rule.Key = key
			request.Rules = append(request.Rules, rule)
		}
		_, err := a.SetRules(x.ctx, &request)
		return err
	})
	cmd.Flags().StringVar(&rate, "refill", "0", "`credits` per second, or with a period 100/day, 1/hour, 5/10m (second, minute, hour, day, week or a duration); kept exactly, or refused; 0 with --capacity 0 denies")
	cmd.Flags().Int64Var(&r.Capacity, "capacity", 0, "`credits` that the bucket holds, 1 to 1e9")
	cmd.Flags().BoolVar(&r.Strict, "strict", false, "never above the rule, through any failure: rather deny")
	cmd.Flags().BoolVar(&r.Shadow, "shadow", false, "decide and count, and admit all the same")
	cmd.Flags().BoolVar(&r.FailOpen, "fail-open", false, "admit where a router reaches no server")
	cmd.Flags().StringVar(&prefix, "default", "", "for all keys with this `prefix` that have no rule of their own, beside KEY or in its place")
	return cmd
}

func ruleGetCommand() *cobra.Command {
	return admissionLeaf(&cobra.Command{Use: "get KEY", Short: "Show a key's own rule", Args: oneKey}, func(x *call, a srtmv1.AdmissionAdminClient) error {
		r, err := a.GetRule(x.ctx, &srtmv1.GetRuleRequest{Key: x.args[0]})
		return x.rules([]*srtmv1.AdmissionRule{r}, err)
	})
}

func ruleListCommand() *cobra.Command {
	var prefix string
	cmd := admissionLeaf(&cobra.Command{Use: "list", Short: "List rules, in the order of their keys"}, func(x *call, a srtmv1.AdmissionAdminClient) error {
		var rules []*srtmv1.AdmissionRule
		err := topics.Pages(func(token string) (string, error) {
			page, err := a.ListRules(x.ctx, &srtmv1.ListRulesRequest{Prefix: prefix, PageSize: 1000, PageToken: token})
			rules = append(rules, page.GetRules()...)
			return page.GetNextPageToken(), err
		})
		return x.rules(rules, err)
	})
	cmd.Flags().StringVar(&prefix, "prefix", "", "only keys that begin with `text`")
	return cmd
}

func (x *call) rules(rules []*srtmv1.AdmissionRule, err error) error {
	return list(x, rules, err, "KEY\tREFILL\tCAPACITY\tOPTIONS", func(r *srtmv1.AdmissionRule) []any {
		var more []string
		for _, f := range []struct {
			set  bool
			name string
		}{{r.GetStrict(), "strict"}, {r.GetShadow(), "shadow"}, {r.GetFailOpen(), "fail-open"}} {
			if f.set {
				more = append(more, f.name)
			}
		}
		return []any{r.GetKey(), refill.Refill{Milli: r.GetRefillMilli(), Seconds: max(1, r.GetRefillPeriodS())}.String(), r.GetCapacity(), strings.Join(more, ",")}
	})
}

func ruleDeleteCommand() *cobra.Command {
	return admissionLeaf(&cobra.Command{Use: "delete KEY", Short: "Delete a rule; its key falls back to the defaults", Args: oneKey}, func(x *call, a srtmv1.AdmissionAdminClient) error {
		_, err := a.DeleteRule(x.ctx, &srtmv1.DeleteRuleRequest{Key: x.args[0]})
		return err
	})
}

// rulesAtOnce is the number of rules in one call, which sets all or none.
const rulesAtOnce = 1000

func ruleImportCommand() *cobra.Command {
	var rules []*srtmv1.AdmissionRule
	return admissionLeaf(&cobra.Command{
		Use:   "import FILE",
		Short: "Add or replace rules from a file",
		Long: `import reads rules as "rule list --output json" writes them, from a file or, for
"-", from standard input, and sets them a thousand at a time, each thousand all
or none. Rules that the file does not name stay.`,
		Args: between(1, 1, "one file, or -"),
		PreRunE: func(cmd *cobra.Command, args []string) error {
			text, err := readFile(cmd, args[0])
			if err != nil {
				return err
			}
			if rules, err = parseRules(text); err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			return nil
		},
	}, func(x *call, a srtmv1.AdmissionAdminClient) error {
		set := 0
		for batch := range slices.Chunk(rules, rulesAtOnce) {
			if _, err := a.SetRules(x.ctx, &srtmv1.SetRulesRequest{Rules: batch}); err != nil {
				return fmt.Errorf("set %s, then: %w", plural.Count(set, "rule"), err)
			}
			set += len(batch)
		}
		_, err := fmt.Fprintf(x.out, "%s set\n", plural.Count(set, "rule"))
		return err
	})
}

func parseRules(text []byte) ([]*srtmv1.AdmissionRule, error) {
	var raw []json.RawMessage
	if err := json.Unmarshal(text, &raw); err != nil {
		return nil, err
	}
	rules := make([]*srtmv1.AdmissionRule, len(raw))
	for i := range raw {
		rules[i] = new(srtmv1.AdmissionRule)
		if err := protojson.Unmarshal(raw[i], rules[i]); err != nil {
			return nil, fmt.Errorf("rule %d: %w", i+1, err)
		}
	}
	return rules, nil
}

func admissionAskCommand() *cobra.Command {
	var r srtmv1.AskRequest
	cmd := admissionLeaf(&cobra.Command{Use: "ask KEY", Short: "Ask whether a key is admitted, and take its credits", Args: oneKey}, func(x *call, a srtmv1.AdmissionAdminClient) error {
		r.Key = x.args[0]
		reply, err := a.Ask(x.ctx, &r)
		return x.print(reply, err, "%s\n", verdictText(reply))
	})
	cmd.Flags().Uint32Var(&r.Cost, "cost", 1, "`credits` that the request takes")
	cmd.Flags().BoolVar(&r.Peek, "peek", false, "take nothing")
	return cmd
}

func partitionListCommand() *cobra.Command {
	return admissionLeaf(&cobra.Command{Use: "list", Short: "List the partitions of keys with the servers that own them"}, func(x *call, a srtmv1.AdmissionAdminClient) error {
		reply, err := a.ListPartitions(x.ctx, &srtmv1.ListPartitionsRequest{})
		return list(x, reply.GetPartitions(), err, "PARTITIONS\tSERVER\tMOVES TO", func(p *srtmv1.AdmissionPartitions) []any {
			return []any{fmt.Sprintf("%d-%d", p.GetFirst(), p.GetLast()), p.GetServer(), p.GetTarget()}
		})
	})
}

func partitionMoveCommand() *cobra.Command {
	var r srtmv1.MovePartitionsRequest
	return admissionLeaf(&cobra.Command{
		Use: "move FIRST[-LAST] SERVER", Short: "Move partitions to another server, with what their keys hold",
		Example: "  srtm admission partition move 0-2047 192.0.2.7:4193",
		Args:    between(2, 2, "partitions, and a server as partition list names it"),
		PreRunE: func(_ *cobra.Command, args []string) error {
			first, last, ok := strings.Cut(args[0], "-")
			if !ok {
				last = first
			}
			for _, n := range []struct {
				text string
				to   *int32
			}{{first, &r.First}, {last, &r.Last}} {
				p, err := strconv.ParseUint(n.text, 10, 12)
				if err != nil {
					return usagef("partitions %q: want 0 to 4095, or two such with a - between", args[0])
				}
				*n.to = int32(p)
			}
			r.Server = args[1]
			return nil
		},
	}, func(x *call, a srtmv1.AdmissionAdminClient) error {
		_, err := a.MovePartitions(x.ctx, &r)
		return err
	})
}

func verdictText(r *srtmv1.AskResponse) string {
	var text string
	switch {
	case r.GetUnanswered() && r.GetAdmit():
		return "admitted by --default-reply: no server answered"
	case r.GetUnanswered():
		return "denied by --default-reply: no server answered"
	case r.GetShadow():
		text = "admitted, though the rule would deny (shadow)"
	case r.GetAdmit():
		text = fmt.Sprintf("admitted, %s left", plural.Count(r.GetLeft(), "credit"))
	case r.GetRetryAfterMs() < 0:
		text = fmt.Sprintf("denied, %s left; at this cost it never is admitted", plural.Count(r.GetLeft(), "credit"))
	default:
		text = fmt.Sprintf("denied, %s left, retry after %d ms", plural.Count(r.GetLeft(), "credit"), r.GetRetryAfterMs())
	}
	if r.GetByDefault() {
		text += " (by default: the key has no rule of its own)"
	}
	return text
}
