package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

func shareCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "share",
		Short: "Who holds which share of which contract",
		Long: `share asks the adaptor who holds what. It is a part of the loaddistributor;
where it is a tbadaptor of its own, give that one's address.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(shareListCommand(), shareHistoryCommand(), shareForgetCommand())
	return cmd
}

func shareListCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "list [TOPIC]",
		Short: "List the shares of all topics, or of one",
		Long: `list shows of every topic what each broker holds, as messages per second and
burst: what is in force (SHARE), the part of it that does not end with its lease
(BASE), what it is meant to have (TARGET), and the most it may be using, which
nobody else can have (RESERVED).`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("%s: want one topic name or none, got %d arguments", cmd.CommandPath(), len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &srtmv1.ListSharesRequest{}
			if len(args) == 1 {
				req.Topic = args[0]
			}
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				r, err := srtmv1.NewGrantServiceClient(conn).ListShares(ctx, req)
				if err != nil {
					return err
				}
				if c.output == formJSON {
					return writeProtos(cmd.OutOrStdout(), r.GetTopics())
				}
				var rows [][]string
				for _, t := range r.GetTopics() {
					for _, m := range t.GetMembers() {
						rows = append(rows, []string{
							t.GetTopic(), m.GetBrokerId(), shareText(m.GetAcknowledged()), shareText(m.GetBase()),
							shareText(m.GetTarget()), shareText(m.GetReserved()),
							strconv.FormatUint(m.GetAcknowledgedEpoch(), 10), policyText(m.GetPolicy()), memberState(m), t.GetShareRule(),
						})
					}
				}
				return table(cmd.OutOrStdout(), []string{"TOPIC", "BROKER", "SHARE", "BASE", "TARGET", "RESERVED", "EPOCH", "POLICY", "STATE", "RULE"}, rows)
			})
		},
	}
	c.flags(cmd)
	return cmd
}

func shareText(s *srtmv1.Share) string {
	return fmt.Sprintf("%s/%d", strconv.FormatFloat(float64(s.GetRateMilli())/1000, 'f', -1, 64), s.GetBurst())
}

func policyText(p srtmv1.LeasePolicy) string {
	switch p {
	case srtmv1.LeasePolicy_LEASE_POLICY_AVAILABLE:
		return "available"
	case srtmv1.LeasePolicy_LEASE_POLICY_STRICT:
		return "strict"
	}
	return "no lease"
}

func memberState(m *srtmv1.MemberShare) string {
	state := "away"
	switch {
	case m.GetConnected():
		return "connected"
	case m.GetLapsed():
		state = "lease over"
	}
	if m.GetAwaySince() != nil {
		state += ", away since " + m.GetAwaySince().AsTime().UTC().Format(time.RFC3339)
	}
	return state
}

func shareHistoryCommand() *cobra.Command {
	var c cli
	var last uint32
	cmd := &cobra.Command{
		Use:   "history TOPIC",
		Short: "What happened to a topic's shares, when and why",
		Long: `history shows the latest changes of a topic's shares, oldest first: what was
granted and why, what brokers acknowledged, and what ended with a lease. The
adaptor remembers the last 512 of each topic; its log has them all.

Reasons of grants: contract (set or changed), rule (loads moved), rest (what
others gave up), hello (the broker came back), lease (one was over or renewed),
forgotten (an operator's word), removed.`,
		Args: oneName,
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				r, err := srtmv1.NewGrantServiceClient(conn).ListShares(ctx, &srtmv1.ListSharesRequest{Topic: args[0], History: last})
				if err != nil {
					return err
				}
				var changes []*srtmv1.ShareChange
				for _, t := range r.GetTopics() {
					changes = append(changes, t.GetHistory()...)
				}
				if c.output == formJSON {
					return writeProtos(cmd.OutOrStdout(), changes)
				}
				var rows [][]string
				for _, h := range changes {
					rows = append(rows, []string{
						h.GetTime().AsTime().UTC().Format(time.RFC3339Nano), h.GetBrokerId(), h.GetEvent(), h.GetReason(),
						shareText(h.GetShare()), shareText(h.GetFlex()), strconv.FormatUint(h.GetEpoch(), 10),
						strconv.FormatFloat(float64(h.GetTokensMilli())/1000, 'f', -1, 64),
					})
				}
				return table(cmd.OutOrStdout(), []string{"TIME", "BROKER", "EVENT", "REASON", "SHARE", "FLEX", "EPOCH", "TOKENS"}, rows)
			})
		},
	}
	cmd.Flags().Uint32Var(&last, "last", 50, "how many `changes`")
	c.flags(cmd)
	return cmd
}

func shareForgetCommand() *cobra.Command {
	var c cli
	cmd := &cobra.Command{
		Use:   "forget BROKER",
		Short: "Give to others what a dead broker held",
		Long: `forget tells the adaptor that a broker's process has ended and will not come back
with what it holds on its disk: its shares go to others. If that is not true, the
contract is exceeded by the broker's base until it is back. It shows what it
freed. A broker that is connected is refused, and so is one of which no topic has
heard.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("%s: want one broker id, got %d arguments", cmd.CommandPath(), len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
				r, err := srtmv1.NewGrantServiceClient(conn).ForgetBroker(ctx, &srtmv1.ForgetBrokerRequest{BrokerId: args[0]})
				if err != nil {
					return err
				}
				return writeFreed(cmd.OutOrStdout(), c.output, args[0], r.GetFreed())
			})
		},
	}
	c.flags(cmd)
	return cmd
}

// writeFreed shows what was reserved for a broker.
func writeFreed(w io.Writer, form, broker string, freed []*srtmv1.FreedShare) error {
	if form == formJSON {
		return writeProtos(w, freed)
	}
	if len(freed) == 0 {
		_, err := fmt.Fprintf(w, "nothing was reserved for %s\n", broker)
		return err
	}
	var rows [][]string
	for _, f := range freed {
		share := "unknown: it waited for the broker"
		if f.GetShare() != nil {
			share = shareText(f.GetShare())
		}
		rows = append(rows, []string{f.GetTopic(), share})
	}
	return table(w, []string{"TOPIC", "FREED"}, rows)
}
