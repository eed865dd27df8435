package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

// channelChange is a command that changes a channel on all brokers of its topic: through
// the loaddistributor in a cluster, otherwise through the HTTP route of the same name.
type channelChange struct {
	verb, short, long, pastTense string
	call                         func(*call) (pending []string, err error)
}

// channelChanges are the commands whose request names a topic and a channel.
var channelChanges = []channelChange{
	{
		"create", "Create a channel on all brokers of a topic",
		"create adds a channel to the topic. It gets what the topic releases from then on.", "created",
		func(x *call) ([]string, error) {
			r, err := x.admin.CreateChannel(x.ctx, &srtmv1.CreateChannelRequest{Topic: x.args[0], Channel: x.args[1]})
			return r.GetPending(), err
		},
	},
	{
		"pause", "Stop the delivery of a channel",
		"pause has all brokers of the topic deliver nothing of the channel. Its messages wait.", "paused",
		func(x *call) ([]string, error) {
			r, err := x.admin.PauseChannel(x.ctx, &srtmv1.PauseChannelRequest{Topic: x.args[0], Channel: x.args[1]})
			return r.GetPending(), err
		},
	},
	{
		"unpause", "Resume the delivery of a channel",
		"unpause has all brokers of the topic deliver what waits in the channel.", "resumed",
		func(x *call) ([]string, error) {
			r, err := x.admin.UnpauseChannel(x.ctx, &srtmv1.UnpauseChannelRequest{Topic: x.args[0], Channel: x.args[1]})
			return r.GetPending(), err
		},
	},
	{
		"delete", "Delete a channel with the messages it still holds",
		"delete removes the channel from all brokers of the topic, and disconnects its consumers.", "deleted",
		func(x *call) ([]string, error) {
			r, err := x.admin.DeleteChannel(x.ctx, &srtmv1.DeleteChannelRequest{Topic: x.args[0], Channel: x.args[1]})
			return r.GetPending(), err
		},
	},
}

func (c channelChange) command() *cobra.Command {
	var b brokers
	cmd := leaf(&cobra.Command{
		Use: c.verb + " TOPIC CHANNEL", Short: c.short, Args: topicAndChannel,
		Long: c.long + `

A broker that is not connected applies the change when it is back; the command names it.
Brokers of no cluster get the request at --nsqd-http-address.`,
		Example: "  srtm channel " + c.verb + " orders billing",
	}, func(x *call) error {
		if len(b.http) > 0 {
			err := b.ask(x, http.MethodPost, "/channel/"+c.verb, url.Values{}, b.http, func(string, []byte) error { return nil })
			return x.print(map[string]string{c.pastTense: x.args[1]}, err, "channel %s of topic %s is %s\n", x.args[1], x.args[0], c.pastTense)
		}
		pending, err := c.call(x)
		text := fmt.Sprintf("channel %s of topic %s is %s\n", x.args[1], x.args[0], c.pastTense)
		if len(pending) > 0 {
			text += fmt.Sprintf("brokers that will apply it when they are back: %s\n", strings.Join(pending, ", "))
		}
		return x.print(map[string]any{c.pastTense: x.args[1], "pending": append([]string{}, pending...)}, err, "%s", text)
	})
	return b.flags(cmd)
}

func channelListCommand() *cobra.Command {
	return leaf(&cobra.Command{
		Use: "list TOPIC", Short: "List the channels of a topic, by name", Args: oneName,
		Example: "  srtm channel list orders",
	}, func(x *call) error {
		r, err := x.admin.ListChannels(x.ctx, &srtmv1.ListChannelsRequest{Topic: x.args[0]})
		return list(x, r.GetChannels(), err, "CHANNEL\tSTATE", func(c *srtmv1.TopicChannel) []any {
			return []any{c.GetName(), map[bool]string{true: "paused", false: "active"}[c.GetPaused()]}
		})
	})
}

func channelEmptyCommand() *cobra.Command {
	var b brokers
	cmd := leaf(&cobra.Command{
		Use: "empty TOPIC CHANNEL", Short: "Discard the messages of a channel", Args: topicAndChannel,
		Long: `empty has every broker of the topic discard what the channel holds, also what is in flight
or deferred. Other channels keep their messages. It cannot be undone, but with nsqd --retain
seek brings back what is retained.`,
		Example: "  srtm channel empty orders billing",
	}, func(x *call) error {
		if len(b.http) > 0 {
			err := b.ask(x, http.MethodPost, "/channel/empty", url.Values{}, b.http, func(string, []byte) error { return nil })
			return x.print(map[string]string{"emptied": x.args[1]}, err, "channel %s of topic %s is empty\n", x.args[1], x.args[0])
		}
		r, err := x.admin.EmptyChannel(x.ctx, &srtmv1.EmptyChannelRequest{Topic: x.args[0], Channel: x.args[1]})
		errs := []error{err}
		var emptied []string
		for _, outcome := range r.GetBrokers() {
			if outcome.GetReason() == "" {
				emptied = append(emptied, outcome.GetBrokerId())
			} else {
				errs = append(errs, fmt.Errorf("broker %s: %s: %s", outcome.GetBrokerId(), outcome.GetReason(), outcome.GetError()))
			}
		}
		if err = errors.Join(errs...); err != nil && len(emptied) == 0 {
			return err
		}
		return errors.Join(err, x.print(map[string]any{"emptied": x.args[1], "brokers": emptied}, nil,
			"channel %s of topic %s is empty on %s\n", x.args[1], x.args[0], strings.Join(emptied, ", ")))
	})
	return b.flags(cmd)
}

func (x *call) channelNames(ctx context.Context, topic string) (names []string, err error) {
	r, err := x.admin.ListChannels(ctx, &srtmv1.ListChannelsRequest{Topic: topic})
	for _, c := range r.GetChannels() {
		names = append(names, c.GetName())
	}
	return names, err
}
