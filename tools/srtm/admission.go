package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/tokenbucket"
)

func admissionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "admission",
		Short: "Rules of the admission service, and what it would say",
		Args:  noArguments,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	rules := &cobra.Command{
		Use:   "rule",
		Short: "What keys may do",
		Long: `rule edits the rules by which admission decides. A key has a bucket of so many
credits (--capacity), refilled at a rate (--refill, credits per second); a
request takes one, or its cost. A key that ends in "*" is a default: it stands
for each key that begins so and has no rule of its own.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	rules.AddCommand(ruleSetCommand(), ruleGetCommand(), ruleListCommand(), ruleDeleteCommand(), ruleImportCommand())
	cmd.AddCommand(rules, admissionAskCommand())
	return cmd
}

// admission runs do with the admission service.
func (c *cli) admission(cmd *cobra.Command, do func(context.Context, srtmv1.AdmissionAdminClient) error) error {
	return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
		return do(ctx, srtmv1.NewAdmissionAdminClient(conn))
	})
}

func (c *cli) admissionFlags(cmd *cobra.Command) {
	c.flagsTo(cmd, "admission", "127.0.0.1:4192", "")
}

func oneKey(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usagef("%s: want one key, got %d arguments", cmd.CommandPath(), len(args))
	}
	return nil
}

func ruleSetCommand() *cobra.Command {
	var c cli
	var refill float64
	var r srtmv1.AdmissionRule
	var prefix string
	cmd := &cobra.Command{
		Use:   "set KEY --refill CREDITS/S --capacity CREDITS",
		Short: "Add or replace a rule",
		Example: `  srtm admission rule set user/17 --refill 100 --capacity 10
  srtm admission rule set 'ip/*' --refill 5 --capacity 20     # each address by itself
  srtm admission rule set user/18                             # denied altogether`,
		Args: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("default") && len(args) == 0 {
				return nil
			}
			return oneKey(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if r.Key = prefix + "*"; len(args) == 1 {
				r.Key = args[0]
			}
			r.RefillMilli = int64(tokenbucket.PerSecond(refill))
			return c.admission(cmd, func(ctx context.Context, a srtmv1.AdmissionAdminClient) error {
				_, err := a.SetRules(ctx, &srtmv1.SetRulesRequest{Rules: []*srtmv1.AdmissionRule{&r}})
				return err
			})
		},
	}
	cmd.Flags().Float64Var(&refill, "refill", 0, "credits `per second`, 0.001 to 1e9; 0 with --capacity 0 denies")
	cmd.Flags().Int64Var(&r.Capacity, "capacity", 0, "`credits` that the bucket holds, 1 to 1e9")
	cmd.Flags().BoolVar(&r.Strict, "strict", false, "never above the rule, through any failure: rather deny")
	cmd.Flags().BoolVar(&r.Shadow, "shadow", false, "decide and count, and admit all the same")
	cmd.Flags().StringVar(&prefix, "default", "", "in place of KEY: a default for all keys with this `prefix`")
	c.admissionFlags(cmd)
	return cmd
}

func ruleGetCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "get KEY",
		Short: "Show a key's own rule",
		Args:  oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.admission(cmd, func(ctx context.Context, a srtmv1.AdmissionAdminClient) error {
				r, err := a.GetRule(ctx, &srtmv1.GetRuleRequest{Key: args[0]})
				if err != nil {
					return err
				}
				return c.writeRules(cmd.OutOrStdout(), []*srtmv1.AdmissionRule{r})
			})
		},
	}
	c.admissionFlags(cmd)
	return cmd
}

func ruleListCommand() *cobra.Command {
	var c cli
	var prefix string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List rules, in the order of their keys",
		Args:  noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.admission(cmd, func(ctx context.Context, a srtmv1.AdmissionAdminClient) error {
				var rules []*srtmv1.AdmissionRule
				for request := (&srtmv1.ListRulesRequest{Prefix: prefix, PageSize: 1000}); ; {
					page, err := a.ListRules(ctx, request)
					if err != nil {
						return err
					}
					rules = append(rules, page.GetRules()...)
					if request.PageToken = page.GetNextPageToken(); request.PageToken == "" {
						return c.writeRules(cmd.OutOrStdout(), rules)
					}
				}
			})
		},
	}
	cmd.Flags().StringVar(&prefix, "prefix", "", "only keys that begin with `text`")
	c.admissionFlags(cmd)
	return cmd
}

func (c *cli) writeRules(w io.Writer, rules []*srtmv1.AdmissionRule) error {
	if c.output == formJSON {
		return writeProtos(w, rules)
	}
	var rows [][]string
	for _, r := range rules {
		var more []string
		for _, f := range []struct {
			set  bool
			name string
		}{{r.GetMode() == srtmv1.AdmissionMode_ADMISSION_MODE_LEASE, "lease"}, {r.GetStrict(), "strict"}, {r.GetShadow(), "shadow"}, {r.GetFailOpen(), "fail-open"}} {
			if f.set {
				more = append(more, f.name)
			}
		}
		rows = append(rows, []string{
			r.GetKey(), strconv.FormatFloat(float64(r.GetRefillMilli())/1000, 'f', -1, 64), strconv.FormatInt(r.GetCapacity(), 10),
			strings.Join(more, ","),
		})
	}
	return table(w, []string{"KEY", "REFILL/S", "CAPACITY", "OPTIONS"}, rows)
}

func ruleDeleteCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "delete KEY",
		Short: "Delete a rule; its key falls back to the defaults",
		Args:  oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.admission(cmd, func(ctx context.Context, a srtmv1.AdmissionAdminClient) error {
				_, err := a.DeleteRule(ctx, &srtmv1.DeleteRuleRequest{Key: args[0]})
				return err
			})
		},
	}
	c.admissionFlags(cmd)
	return cmd
}

// rulesAtOnce is how many rules one call sets, all or none.
const rulesAtOnce = 1000

func ruleImportCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "import FILE",
		Short: "Add or replace rules from a file",
		Long: `import reads rules as "rule list --output json" writes them, from a file or, for
"-", from standard input, and sets them a thousand at a time, each thousand all
or none. Rules that the file does not name stay.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("%s: want one file, or -, got %d arguments", cmd.CommandPath(), len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			in := cmd.InOrStdin()
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return err
				}
				defer f.Close()
				in = f
			}
			rules, err := readRules(in)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			return c.admission(cmd, func(ctx context.Context, a srtmv1.AdmissionAdminClient) error {
				set := 0
				for len(rules) > 0 {
					some := rules[:min(rulesAtOnce, len(rules))]
					if _, err := a.SetRules(ctx, &srtmv1.SetRulesRequest{Rules: some}); err != nil {
						return fmt.Errorf("%d rules were set, then: %w", set, err)
					}
					rules, set = rules[len(some):], set+len(some)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%d rules set\n", set)
				return nil
			})
		},
	}
	c.admissionFlags(cmd)
	return cmd
}

func readRules(in io.Reader) ([]*srtmv1.AdmissionRule, error) {
	var raw []json.RawMessage
	if err := json.NewDecoder(bufio.NewReader(in)).Decode(&raw); err != nil {
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
	var c cli
	var r srtmv1.AskRequest
	cmd := &cobra.Command{
		Use:   "ask KEY",
		Short: "Ask whether a key may go on, and take its credits",
		Args:  oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			r.Key = args[0]
			return c.admission(cmd, func(ctx context.Context, a srtmv1.AdmissionAdminClient) error {
				reply, err := a.Ask(ctx, &r)
				if err != nil {
					return err
				}
				if c.output == formJSON {
					return writeProto(cmd.OutOrStdout(), reply)
				}
				_, err = fmt.Fprintln(cmd.OutOrStdout(), verdictText(reply))
				return err
			})
		},
	}
	cmd.Flags().Uint32Var(&r.Cost, "cost", 1, "`credits` that the request takes")
	cmd.Flags().BoolVar(&r.Peek, "peek", false, "take nothing")
	c.admissionFlags(cmd)
	return cmd
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
		text = fmt.Sprintf("admitted, %d credits left", r.GetLeft())
	case r.GetRetryAfterMs() < 0:
		text = "denied; at this cost it never is admitted"
	default:
		text = fmt.Sprintf("denied, retry after %d ms", r.GetRetryAfterMs())
	}
	if r.GetByDefault() {
		text += " (by default: the key has no rule of its own)"
	}
	return text
}
