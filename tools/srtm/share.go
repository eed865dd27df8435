package main

import (
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

func shareCommand() *cobra.Command {
	return parent("share", "Who holds which share of which contract", `share reads from the adaptor who holds what. It is a part of the loaddistributor;
where it is a tbadaptor of its own, give that one's address as
--loaddistributor-address.`,
		shareListCommand(), shareHistoryCommand(), shareForgetCommand())
}

func shareListCommand() *cobra.Command {
	return leaf(&cobra.Command{
		Use:   "list [TOPIC]",
		Short: "List the shares of all topics, or of one",
		Long: `list shows of every topic what each broker holds, as messages per second and
burst: what is in force (SHARE), the part of it that does not end with its lease
(BASE), what it is meant to have (TARGET), and the most it may be using, which
no other broker can have (RESERVED).`,
		Args: between(0, 1, "one topic name or none"),
	}, func(x *call) error {
		req := &srtmv1.ListSharesRequest{}
		if len(x.args) == 1 {
			req.Topic = x.args[0]
		}
		r, err := srtmv1.NewGrantServiceClient(x.conn).ListShares(x.ctx, req)
		return x.show(jsonArray(r.GetTopics()), err, func() error {
			type member struct {
				topic *srtmv1.TopicShares
				*srtmv1.MemberShare
			}
			var all []member
			for _, t := range r.GetTopics() {
				for _, m := range t.GetMembers() {
					all = append(all, member{t, m})
				}
			}
			return table(x.out, "TOPIC\tBROKER\tSHARE\tBASE\tTARGET\tRESERVED\tEPOCH\tPOLICY\tSTATE\tRULE", all, func(m member) []any {
				return []any{
					m.topic.GetTopic(), m.GetBrokerId(), shareText(m.GetAcknowledged()), shareText(m.GetBase()), shareText(m.GetTarget()), shareText(m.GetReserved()),
					m.GetAcknowledgedEpoch(), policyText(m.GetPolicy()), memberState(m.MemberShare), m.topic.GetShareRule(),
				}
			})
		})
	})
}

func shareText(s *srtmv1.Share) string {
	return fmt.Sprintf("%s/%d", thousandths(s.GetRateMilli()), s.GetBurst())
}

func thousandths(n int64) string { return strconv.FormatFloat(float64(n)/1000, 'f', -1, 64) }

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
	state := "disconnected"
	switch {
	case m.GetConnected():
		return "connected"
	case m.GetLapsed():
		state = "lease over"
	}
	if m.GetAwaySince() != nil {
		state += ", disconnected since " + m.GetAwaySince().AsTime().UTC().Format(time.RFC3339)
	}
	return state
}

func shareHistoryCommand() *cobra.Command {
	var last uint32
	cmd := leaf(&cobra.Command{
		Use:   "history TOPIC",
		Short: "What happened to a topic's shares, when and why",
		Long: `history shows the latest changes of a topic's shares, oldest first: what was
granted and why, what brokers acknowledged, and what ended with a lease. The
adaptor remembers the last 512 of each topic; its log has them all.

Reasons of grants: contract (set or changed), rule (loads moved), rest (what
others gave up), hello (the broker came back), lease (one was over or renewed),
forgotten (by an operator), removed.`,
		Args: oneName,
	}, func(x *call) error {
		r, err := srtmv1.NewGrantServiceClient(x.conn).ListShares(x.ctx, &srtmv1.ListSharesRequest{Topic: x.args[0], History: last})
		var changes []*srtmv1.ShareChange
		for _, t := range r.GetTopics() {
			changes = append(changes, t.GetHistory()...)
		}
		return list(x, changes, err, "TIME\tBROKER\tEVENT\tREASON\tSHARE\tFLEX\tEPOCH\tTOKENS", func(h *srtmv1.ShareChange) []any {
			return []any{
				h.GetTime().AsTime().UTC().Format(time.RFC3339Nano), h.GetBrokerId(), h.GetEvent(), h.GetReason(),
				shareText(h.GetShare()), shareText(h.GetFlex()), h.GetEpoch(), thousandths(h.GetTokensMilli()),
			}
		})
	})
	cmd.Flags().Uint32Var(&last, "last", 50, "how many `changes`")
	return cmd
}

func shareForgetCommand() *cobra.Command {
	return leaf(&cobra.Command{
		Use:   "forget BROKER",
		Short: "Give to others what a dead broker held",
		Long: `forget declares that a broker's process has ended and will not come back
with what it holds on its disk: its shares go to others. If that is not true, the
contract is exceeded by the broker's base until it is back. It shows what it
freed. A broker that is connected is refused, and so is one of which no topic has
heard.`,
		Args: between(1, 1, "one broker id"),
	}, func(x *call) error {
		r, err := srtmv1.NewGrantServiceClient(x.conn).ForgetBroker(x.ctx, &srtmv1.ForgetBrokerRequest{BrokerId: x.args[0]})
		return x.show(jsonArray(r.GetFreed()), err, func() error { return freedTable(x.out, x.args[0], r.GetFreed()) })
	})
}

// freedTable lists the freed shares of a broker.
func freedTable(w io.Writer, broker string, freed []*srtmv1.FreedShare) error {
	if len(freed) == 0 {
		_, err := fmt.Fprintf(w, "nothing was reserved for %s\n", broker)
		return err
	}
	return table(w, "TOPIC\tFREED", freed, func(f *srtmv1.FreedShare) []any {
		if f.GetShare() == nil {
			return []any{f.GetTopic(), "unknown: it waited for the broker"}
		}
		return []any{f.GetTopic(), shareText(f.GetShare())}
	})
}
