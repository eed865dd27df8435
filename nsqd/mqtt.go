package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client/pool"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/kernel/stamp"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/agent"
	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/nsqd/conn"
	"github.com/srtm-io/srtm/nsqd/forward"
	"github.com/srtm-io/srtm/nsqd/mqtt"
	"github.com/srtm-io/srtm/pacing/police"
)

// willsWithin bounds the time to publish the wills of all clients when nsqd stops.
const willsWithin = 2 * time.Second

// mqttConfig returns the configuration of the MQTT part.
func (d *nsqd) mqttConfig() mqtt.Config {
	config := d.opts.mqtt
	config.Folder, config.Log = filepath.Join(d.opts.dataPath, "mqtt"), d.log
	config.Publish, config.ClaimChannel, config.DeleteChannel = d.publishWill, d.claimChannel, d.deleteChannel
	return config
}

// publishWill is mqtt.Config.Publish.
func (d *nsqd) publishWill(ctx context.Context, clientID, owner string, w *nsq.Will) error {
	if limit := d.opts.conn.Session.Limits.MaxMessageSize; len(w.Body) > limit {
		return wire.NewError(wire.CodeBadMessage, fmt.Sprintf("the will of %d bytes is larger than --max-msg-size %d", len(w.Body), limit))
	}
	publisher := forward.Publisher{ClientID: clientID, Identity: police.Identity{Kind: "client", ID: clientID}, Visits: true}
	if kind, id, found := strings.Cut(owner, ":"); found {
		publisher.Identity = police.Identity{Kind: kind, ID: id}
	}
	if w.Publisher != "" {
		publisher.ClientID, publisher.Identity = w.Publisher, conn.DeviceIdentity(w.Publisher)
	}
	t, err := d.broker.TopicForClient([]byte(w.Topic))
	if err == nil {
		from := t.Visit(publisher.Identity)
		defer from.Leave()
		var stored broker.Stored
		now := clock.Mono()
		p := broker.Published{Body: w.Body, Attribute: w.Attribute, Arrival: stamp.Arrival{At: now, Source: stamp.Read}, From: from, Stored: &stored}
		if err = t.Publish(now, clock.Wall(), p); err == nil {
			err = t.Sync(stored)
		}
	}
	if d.opts.conn.Forward != nil && (errors.Is(err, broker.ErrUnknownTopic) || errors.Is(err, broker.ErrRetired)) {
		line := d.opts.conn.Forward.Line(publisher)
		defer line.Close()
		pending := line.Begin(ctx, w.Topic, pool.Message{Body: w.Body, Attribute: w.Attribute})
		return pending.Verdict(nsq.OpPub.Failed())
	}
	return conn.Refusal([]byte(w.Topic), err)
}

// claimChannel is mqtt.Config.ClaimChannel. A broker without a control plane keeps all sessions of its topics.
func (d *nsqd) claimChannel(ctx context.Context, topic, channel string) error {
	if !d.opts.managed() {
		return nil
	}
	err := d.control.ChangeChannel(ctx, topic, channel, srtmv1.ChannelChange_CHANNEL_CHANGE_CLAIM)
	if errors.Is(err, agent.ErrTopicUnknown) {
		return nil
	}
	return err
}

// deleteChannel is mqtt.Config.DeleteChannel. In a cluster the control plane deletes the channel, because
// the topic may be on other brokers.
func (d *nsqd) deleteChannel(ctx context.Context, topic, channel string, used bool) error {
	t, err := d.broker.Topic([]byte(topic))
	here := err == nil
	if !here && !errors.Is(err, broker.ErrUnknownTopic) {
		return fmt.Errorf("channel %q of topic %q: %w", channel, topic, err)
	}
	if here && !used && slices.ContainsFunc(t.Stats().Channels, func(c broker.ChannelStats) bool { return c.Name == channel && c.Consumers > 0 }) {
		return mqtt.ErrInUse
	}
	if d.opts.managed() {
		change := srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE_UNUSED
		if used {
			change = srtmv1.ChannelChange_CHANNEL_CHANGE_DELETE
		}
		err = d.control.ChangeChannel(ctx, topic, channel, change)
		switch {
		case errors.Is(err, agent.ErrChannelInUse):
			return mqtt.ErrInUse
		case err != nil && !errors.Is(err, agent.ErrTopicUnknown):
			return fmt.Errorf("channel %q of topic %q: %w", channel, topic, err)
		case err == nil:
			return nil
		}
	}
	if !here {
		return nil
	}
	if err = t.DeleteChannel(channel); errors.Is(err, broker.ErrUnknownChannel) || errors.Is(err, broker.ErrGone) {
		return nil
	}
	return err
}
