package main

import (
	"context"
	"errors"
	"fmt"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/httpapi"
)

// confirmChannel is broker.Config.Confirm.
func (d *nsqd) confirmChannel(topic, channel string, created uint64) error {
	if d.control == nil {
		return agent.ErrDisconnected // nsqd does not serve yet
	}
	err := d.control.Confirm(topic, channel, created)
	if errors.Is(err, agent.ErrTooManyChannels) {
		return fmt.Errorf("%w: %w", broker.ErrTooManyChannels, err)
	}
	return err
}

var channelChanges = map[httpapi.ChannelChange]srtmv1.ChannelChange{
	httpapi.PauseChannel:   srtmv1.ChannelChange_CHANNEL_CHANGE_PAUSE,
	httpapi.UnpauseChannel: srtmv1.ChannelChange_CHANNEL_CHANGE_UNPAUSE,
	httpapi.DeleteChannel:  srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE,
}

// changeChannel is httpapi.Config.ChangeChannel.
func (d *nsqd) changeChannel(ctx context.Context, topic, channel string, change httpapi.ChannelChange) error {
	err := d.control.ChangeChannel(ctx, topic, channel, channelChanges[change])
	switch {
	case err == nil:
		return nil
	case errors.Is(err, agent.ErrTopicUnknown):
		return httpapi.ErrUnmanaged
	case errors.Is(err, agent.ErrChannelUnknown):
		return fmt.Errorf("channel %q: %w", channel, broker.ErrUnknownChannel)
	}
	return fmt.Errorf("channel %q: %w: %w", channel, httpapi.ErrControl, err)
}
