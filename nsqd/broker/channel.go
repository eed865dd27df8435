package broker

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
	"github.com/srtm-io/srtm/nsqd/stats"
)

// channelSet has a topic's channels: which exist, what the control plane knows of them, and the
// latencies of their messages.
type channelSet struct {
	// Set once.
	runner *runner
	orders *orders
	expiry *expiries
	store  *store // nil if the topic has no disk

	// Guarded by runner.mu.
	identity metadata.Identity // of the topic, from the control plane; zero: unknown
	// memberships is the control plane's knowledge of durable channels, by name.
	memberships map[string]membership
	// endToEnd has the channels with recently finished messages.
	endToEnd map[*queue.Channel]*stats.Window
}

// CreateChannel creates the channel if necessary, and returns after the channel is stored
// durably. In a cluster it also waits for Config.Confirm.
// Errors: ErrBadName, ErrGone, ErrDraining, ErrTooManyChannels, ErrStorage.
func (t *Topic) CreateChannel(name string) error {
	err := t.channels.orderChannel(name)
	if err == nil {
		err = t.channels.confirm(name)
	}
	return err
}

// orderChannel is CreateChannel for this broker alone.
func (cs *channelSet) orderChannel(name string) error {
	switch {
	case cs.has(name): // a subscriber may have created it just now
		return cs.runner.shared.Recorded()
	case wire.Ephemeral(name) || !wire.ValidChannelName(name):
		return cs.createChannel(name, false)
	}
	return cs.orders.ordered(func(m *metadata.Topic) bool {
		index, found := slices.BinarySearchFunc(m.Channels, name, func(c metadata.Channel, name string) int { return strings.Compare(c.Name, name) })
		if !found {
			m.Channels = slices.Insert(slices.Clone(m.Channels), index, metadata.Channel{Name: name})
		}
		return true
	}, func(now mono.Time, s *step) error {
		if cs.runner.mu.closed {
			return cs.runner.open()
		}
		_, err := cs.channel(now, name, s, false)
		return err
	})
}

// createChannel creates a channel. A restored channel may exceed the limits.
func (cs *channelSet) createChannel(name string, restored bool) error {
	if !wire.ValidChannelName(name) {
		return fmt.Errorf("channel %q: %w", name, ErrBadName)
	}
	s := cs.runner.begin()
	now := cs.runner.shared.now()
	defer cs.runner.end(s)
	if cs.runner.mu.closed {
		return cs.runner.open()
	}
	_, err := cs.channel(now, name, s, restored)
	return err
}

// channel returns the channel, creating it if necessary.
// Error: ErrTooManyChannels. Requires: mu held.
func (cs *channelSet) channel(now mono.Time, name string, s *step, restored bool) (*queue.Channel, error) {
	c := cs.runner.mu.core.Channel(name)
	if c == nil {
		b := cs.runner.shared
		all, own := int(b.channels.Add(1)), len(cs.runner.mu.core.Channels())+1
		if !restored && (b.cfg.MaxChannels > 0 && all > b.cfg.MaxChannels || b.cfg.MaxTopicChannels > 0 && own > b.cfg.MaxTopicChannels) {
			b.channels.Add(-1)
			b.refused.channels.Add(1)
			return nil, fmt.Errorf("channel %q of topic %q, %d channels, %d in all: %w", name, cs.runner.name, own-1, all-1, ErrTooManyChannels)
		}
		c = cs.runner.mu.core.CreateChannel(now, name, &s.fx)
		cs.expiry.applyExpiry(now, c, s)
		s.listed = true
	}
	return c, nil
}

// ChannelNames returns the names of the channels, sorted.
func (t *Topic) ChannelNames() []string {
	t.runner.mu.Lock()
	defer t.runner.mu.Unlock()
	channels := t.runner.mu.core.Channels()
	names := make([]string, len(channels))
	for i, c := range channels {
		names[i] = c.Name()
	}
	return names
}

// DeleteChannel deletes a channel with its messages and ends its subscriptions.
// Errors: ErrUnknownChannel, ErrDraining, ErrStorage.
func (t *Topic) DeleteChannel(name string) error {
	if err := t.movable(name); err != nil {
		return err
	}
	err := t.orders.orderedChannel(name, func(*metadata.Channel) bool { return false },
		func(now mono.Time, c *queue.Channel, s *step) { t.channels.removeChannel(now, c, s) })
	if err != nil {
		return err
	}
	err = t.store.settled() // otherwise, after a crash, a new channel of this name would get the old messages
	t.deleteIfEphemeral()
	return err
}

// removeChannel deletes the channel and ends its subscriptions.
// Requires: mu held.
func (cs *channelSet) removeChannel(now mono.Time, c *queue.Channel, s *step) {
	for _, id := range c.Consumers().IDs() {
		sub := cs.runner.mu.consumers[id]
		cs.detach(sub)
		s.woken = append(s.woken, sub)
	}
	if err := cs.runner.mu.core.DeleteChannel(now, c.Name(), &s.fx); err != nil {
		panic("broker: " + err.Error())
	}
	cs.runner.shared.channels.Add(-1)
	if cs.runner.shared.cfg.AutoCreate { // in a cluster the control plane decides
		cs.runner.mu.expiry.set(c.Name(), expiry.Settings{})
	}
	delete(cs.memberships, c.Name())
	delete(cs.endToEnd, c)
	s.listed = true
}

// finished records the end-to-end latency of finished messages, if Config.EndToEnd is set.
// Requires: mu held.
func (cs *channelSet) finished(now mono.Time, c *queue.Channel, messages []*queue.Message) {
	span := cs.runner.shared.cfg.EndToEnd
	if span == 0 || len(messages) == 0 {
		return
	}
	w := cs.endToEnd[c]
	if w == nil {
		if cs.endToEnd == nil {
			cs.endToEnd = make(map[*queue.Channel]*stats.Window)
		}
		w = new(stats.Window)
		cs.endToEnd[c] = w
	}
	for _, m := range messages {
		w.Record(now, span, now.Sub(m.Arrival))
	}
}

// EmptyChannel discards a channel's messages. The messages do not reappear after a crash.
// Errors: ErrUnknownChannel, ErrDraining, ErrStorage.
func (t *Topic) EmptyChannel(name string) error {
	if err := t.movable(name); err != nil {
		return err
	}
	err := t.runner.onChannel(name, func(now mono.Time, c *queue.Channel, s *step) {
		t.runner.mu.core.EmptyChannel(now, c, &s.fx)
	})
	return errors.Join(err, t.store.settled())
}

// PauseChannel stops the channel's deliveries. Errors: ErrUnknownChannel, ErrDraining,
// ErrStorage.
func (t *Topic) PauseChannel(name string) error {
	return t.orders.orderedChannel(name, func(c *metadata.Channel) bool {
		c.Paused = true
		return true
	}, func(_ mono.Time, c *queue.Channel, _ *step) { c.Pause() })
}

// UnpauseChannel resumes deliveries. Errors: ErrUnknownChannel, ErrDraining, ErrStorage.
func (t *Topic) UnpauseChannel(name string) error {
	return t.orders.orderedChannel(name, func(c *metadata.Channel) bool {
		c.Paused = false
		return true
	}, func(now mono.Time, c *queue.Channel, s *step) { t.runner.mu.core.UnpauseChannel(now, c, &s.fx) })
}
