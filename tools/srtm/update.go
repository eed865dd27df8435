package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/topics"
)

// fieldOf maps flags to fields of a specification.
var fieldOf = map[string]string{
	"rate": "contract.rate_milli", "burst": "contract.burst", "over-limit": "contract.over_limit",
	"slo-quantile": "contract.slo.quantile", "slo-latency": "contract.slo.latency",
	"policy": "placement_policy", "share-rule": "share_rule", "pacing": "pacing", "auto-burst": "auto", "auto-rate-limit": "auto",
	"ttl": "expiry.ttl", "max-attempts": "expiry.max_attempts", "dead-letter": "expiry.dead_letter_topic", "channel-expiry": "channel_expiry",
	"group": "groups", "publisher": "publishers", "channel": "channels",
}

func topicUpdateCommand() *cobra.Command {
	var n newTopic
	var r *srtmv1.UpdateTopicRequest
	var whole bool
	var epoch uint64
	var wait time.Duration
	cmd := leaf(&cobra.Command{
		Use:   "update NAME",
		Short: "Change a topic's contract, SLO, publishers or channels",
		Long: `update changes what the flags say, and nothing else; the flags are those of create,
and their defaults hold with --replace only. A list is given as a whole: with --group
all groups are those that are given.

--file reads JSON and changes the fields that are in it: a specification, or what
srtm topic describe --output json prints, which is refused if the topic has changed
since (see --epoch). [] removes all of a list.

--replace gives the whole specification, as to create: what is left out is removed, or
becomes the default. It prints first what that is.

Publishers stay where they are as long as their brokers carry them; those that move
finish on their old broker first. When it does not fit, the topic stays as it was.

A rate or burst that is named is fixed: if the contract followed what is measured, it
no longer does. --auto-rate-limit and --auto-burst have it follow again.

A contract that is lowered is in force on all brokers that can be reached when update
returns. The state is "lowering" while other brokers may use more; it names each, what
it may use, and when that ends. The state is "raising" while brokers have not confirmed
all of a contract that is raised; it names the brokers that this waits for. --wait waits
until neither is so.`,
		Example: `  srtm topic update sensors --rate 22000 --burst 60
  srtm topic describe sensors --output json | srtm topic update sensors --file -`,
		Args: n.nameOrFile,
		PreRunE: func(cmd *cobra.Command, args []string) (err error) {
			if whole {
				r = &srtmv1.UpdateTopicRequest{}
				r.Spec, err = n.spec(cmd, args)
			} else {
				r, err = n.change(cmd, args)
			}
			if err == nil && cmd.Flags().Changed("epoch") {
				r.ExpectedEpoch = epoch
			}
			if err == nil && wait < 0 {
				err = usagef("--wait %v is negative", wait)
			}
			return err
		},
	}, func(x *call) error {
		report := func(string) {}
		if whole {
			present, err := x.topic(r.Spec.GetName())
			if err != nil {
				return err
			}
			// Apply the printed changes, or nothing.
			r.ExpectedEpoch = cmp.Or(r.ExpectedEpoch, present.GetEpoch())
			removed := removedFields(present.GetSpec(), r.Spec)
			report = func(what string) { fmt.Fprintf(x.cmd.ErrOrStderr(), "%s:%s", what, removed) }
		}
		report("--replace removes from topic " + r.Spec.GetName())
		updated, err := x.admin.UpdateTopic(x.ctx, r)
		if err == nil {
			report("replaced; removed")
		}
		topic := updated.GetTopic()
		if err != nil || !unconfirmed(topic) {
			return x.describe(topic, err)
		}
		if !x.cmd.Flags().Changed("wait") {
			fmt.Fprintln(x.cmd.ErrOrStderr(), "the contract is not in force on all brokers yet: see the state; --wait waits for it")
			return x.describe(topic, nil)
		}
		topic, confirmErr := x.confirmed(topic, wait)
		return errors.Join(x.describe(topic, nil), confirmErr)
	})
	n.flags(cmd)
	cmd.Flags().DurationVar(&wait, "wait", 0, "wait until the contract is in force on all brokers, for so long; without a value within --timeout")
	cmd.Flags().Lookup("wait").NoOptDefVal = "0s"
	cmd.Flags().BoolVar(&whole, "replace", false, "replace the whole specification")
	cmd.Flags().Uint64Var(&epoch, "epoch", 0, "`epoch` that the topic must have, as describe shows it; 0: any. Without it that of --file, or with --replace the present one")
	return cmd
}

// unconfirmed reports whether brokers still have to confirm their shares of a changed
// contract.
func unconfirmed(topic *srtmv1.Topic) bool {
	return topic.GetState() == srtmv1.TopicState_TOPIC_STATE_LOWERING || topic.GetState() == srtmv1.TopicState_TOPIC_STATE_RAISING
}

// confirmed waits until all brokers apply the contract, and returns the topic.
func (x *call) confirmed(topic *srtmv1.Topic, limit time.Duration) (*srtmv1.Topic, error) {
	ctx := x.ctx
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(x.cmd.Context(), limit)
		defer cancel()
	}
	for unconfirmed(topic) {
		x.progress.printf("%s", topic.GetReason())
		if !clock.Sleep(ctx, confirmPause) {
			return topic, fmt.Errorf("topic %s is updated, and its contract is not in force on all brokers", topic.GetSpec().GetName())
		}
		now, err := x.topicSummary(ctx, topic.GetSpec().GetName())
		switch {
		case err == nil:
			topic = now
		case ctx.Err() == nil:
			return topic, err
		}
	}
	return topic, nil
}

const confirmPause = 500 * time.Millisecond

// change builds the request from the flags or the file.
func (n *newTopic) change(cmd *cobra.Command, args []string) (*srtmv1.UpdateTopicRequest, error) {
	r := &srtmv1.UpdateTopicRequest{UpdateMask: &fieldmaskpb.FieldMask{}}
	paths := &r.UpdateMask.Paths
	var err error
	if n.file != "" {
		var text json.RawMessage
		if r.Spec, text, r.ExpectedEpoch, err = n.read(cmd, args); err != nil {
			return nil, err
		}
		*paths = fields("", text, r.Spec.ProtoReflect().Descriptor())
	} else {
		if r.Spec, err = n.spec(cmd, args); err != nil {
			return nil, err
		}
		for _, flag := range slices.Sorted(maps.Keys(fieldOf)) {
			if cmd.Flags().Changed(flag) {
				*paths = append(*paths, fieldOf[flag])
			}
		}
	}
	if len(*paths) == 0 {
		return nil, usagef("no change is given")
	}
	// A loaddistributor without support for masks would replace the whole specification,
	// so an invalid field makes it refuse. Other loaddistributors ignore fields outside
	// the mask.
	const refuse = "a loaddistributor that knows no update_mask is to refuse this"
	if !slices.Contains(*paths, fieldOf["policy"]) {
		r.Spec.PlacementPolicy = refuse
	} else if !slices.Contains(*paths, fieldOf["share-rule"]) {
		r.Spec.ShareRule = refuse
	}
	return r, nil
}

// fields returns the paths of the fields in a specification's JSON, without the name.
func fields(prefix string, text json.RawMessage, descriptor protoreflect.MessageDescriptor) (paths []string) {
	var object map[string]json.RawMessage
	if json.Unmarshal(text, &object) != nil {
		return nil // null: absent
	}
	for _, key := range slices.Sorted(maps.Keys(object)) {
		field := descriptor.Fields().ByTextName(key)
		if field == nil {
			field = descriptor.Fields().ByJSONName(key)
		}
		path := prefix + string(field.Name()) // protojson has refused all other fields
		message := field.Message()
		switch {
		case path == "name" || string(object[key]) == "null":
		case message != nil && !field.IsList() && !field.IsMap() && message.ParentFile().Package() == "srtm.v1":
			paths = append(paths, fields(path+".", object[key], message)...)
		default:
			paths = append(paths, path)
		}
	}
	return paths
}

// shownIDs is the number of publisher ids in a list of removals.
const shownIDs = 5

// removedFields lists the parts of from that are missing in to, and the other changed values, except r and b.
func removedFields(from, to *srtmv1.TopicSpec) string {
	var lines []string
	keep := map[string]bool{}
	for _, p := range to.GetPublishers() {
		keep[p.GetId()] = true
	}
	var gone []string
	for _, p := range from.GetPublishers() {
		if !keep[p.GetId()] {
			gone = append(gone, p.GetId())
		}
	}
	if n := len(gone); n > 0 {
		text := fmt.Sprintf("publishers: %d of %d: %s", n, len(from.GetPublishers()), strings.Join(gone[:min(n, shownIDs)], ", "))
		if n > shownIDs {
			text += ", ..."
		}
		lines = append(lines, text)
	}
	counts := map[string]int32{}
	for _, g := range to.GetGroups() {
		counts[g.GetKey()] = g.GetCount()
	}
	for _, g := range from.GetGroups() {
		if missing := g.GetCount() - counts[g.GetKey()]; missing > 0 {
			lines = append(lines, fmt.Sprintf("publishers of group %q: %d of %d", g.GetKey(), missing, g.GetCount()))
		}
	}
	for _, channel := range from.GetChannels() {
		if !slices.Contains(to.GetChannels(), channel) {
			lines = append(lines, "channel "+channel+" (it stays on brokers that have it)")
		}
	}
	becomes := func(what, was, is string) {
		if was != is {
			lines = append(lines, fmt.Sprintf("%s %s: becomes %s", what, was, is))
		}
	}
	becomes("SLO", topics.SLO(from.GetContract().GetSlo()), topics.SLO(to.GetContract().GetSlo()))
	overLimit := func(s *srtmv1.TopicSpec) string {
		if s.GetContract().GetOverLimit() == srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_REJECT {
			return "reject"
		}
		return "delay"
	}
	becomes("over limit", overLimit(from), overLimit(to))
	becomes("policy", from.GetPlacementPolicy(), cmp.Or(to.GetPlacementPolicy(), from.GetPlacementPolicy()))
	becomes("pacing", pacingText(from.GetPacing()), pacingText(to.GetPacing()))
	becomes("messages", keptText(from.GetExpiry()), keptText(to.GetExpiry()))
	for _, channel := range slices.Sorted(maps.Keys(from.GetChannelExpiry())) {
		becomes("messages of channel "+channel, keptText(from.GetChannelExpiry()[channel]), keptText(to.GetChannelExpiry()[channel]))
	}
	becomes("share rule", from.GetShareRule(), cmp.Or(to.GetShareRule(), from.GetShareRule()))
	if len(lines) == 0 {
		return " nothing\n"
	}
	return "\n  " + strings.Join(lines, "\n  ") + "\n"
}
