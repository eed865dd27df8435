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

// CreateChannel creates the channel if necessary, and returns after the channel is stored
// durably. In a cluster it also waits for Config.Confirm.
// Errors: ErrBadName, ErrGone, ErrDraining, ErrTooManyChannels, ErrStorage.
func (t *Topic) CreateChannel(name string) error {
	err := t.orderChannel(name)
	if err == nil {
		err = t.confirm(name)
	}
	return err
}

// orderChannel is CreateChannel for this broker alone.
func (t *Topic) orderChannel(name string) error {
	switch {
	case t.has(name): // a subscriber may have created it just now
		return t.shared.Recorded()
	case wire.Ephemeral(name) || !wire.ValidChannelName(name):
		return t.createChannel(name, false)
	}
	return t.ordered(func(m *metadata.Topic) bool {
		at, found := slices.BinarySearchFunc(m.Channels, name, func(c metadata.Channel, name string) int { return strings.Compare(c.Name, name) })
		if !found {
			m.Channels = slices.Insert(slices.Clone(m.Channels), at, metadata.Channel{Name: name})
		}
		return true
	}, func(now mono.Time, s *step) error {
		if t.mu.closed {
			return t.open()
		}
		_, err := t.channel(now, name, s, false)
		return err
	})
}

// createChannel creates a channel. A restored channel may exceed the limits.
func (t *Topic) createChannel(name string, restored bool) error {
	if !wire.ValidChannelName(name) {
		return fmt.Errorf("channel %q: %w", name, ErrBadName)
	}
	s := t.begin()
	now := t.shared.now()
	defer t.end(s)
	if t.mu.closed {
		return t.open()
	}
	_, err := t.channel(now, name, s, restored)
	return err
}

// channel returns the channel, creating it if necessary.
// Error: ErrTooManyChannels. Requires: mu held.
func (t *Topic) channel(now mono.Time, name string, s *step, restored bool) (*queue.Channel, error) {
	c := t.mu.core.Channel(name)
	if c == nil {
		b := t.shared
		all, own := int(b.channels.Add(1)), len(t.mu.core.Channels())+1
		if !restored && (b.cfg.MaxChannels > 0 && all > b.cfg.MaxChannels || b.cfg.MaxTopicChannels > 0 && own > b.cfg.MaxTopicChannels) {
			b.channels.Add(-1)
			b.refused.channels.Add(1)
			return nil, fmt.Errorf("channel %q of topic %q, %d channels, %d in all: %w", name, t.name, own-1, all-1, ErrTooManyChannels)
		}
		c = t.mu.core.CreateChannel(now, name, &s.fx)
		t.applyExpiry(now, c, s)
		s.listed = true
	}
	return c, nil
}

// ChannelNames returns the names of the channels, sorted.
func (t *Topic) ChannelNames() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	channels := t.mu.core.Channels()
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
	err := t.orderedChannel(name, func(*metadata.Channel) bool { return false },
		func(now mono.Time, c *queue.Channel, s *step) { t.removeChannel(now, c, s) })
	if err != nil {
		return err
	}
	err = t.store.settled() // otherwise, after a crash, a new channel of this name would get the old messages
	t.deleteIfEphemeral()
	return err
}

// removeChannel deletes the channel and ends its subscriptions.
// Requires: mu held.
func (t *Topic) removeChannel(now mono.Time, c *queue.Channel, s *step) {
	for _, id := range c.Consumers().IDs() {
		sub := t.mu.consumers[id]
		t.detach(sub)
		s.woken = append(s.woken, sub)
	}
	if err := t.mu.core.DeleteChannel(now, c.Name(), &s.fx); err != nil {
		panic("broker: " + err.Error())
	}
	t.shared.channels.Add(-1)
	if t.shared.cfg.AutoCreate { // in a cluster the control plane decides
		t.mu.expiry.set(c.Name(), expiry.Settings{})
	}
	delete(t.memberships, c.Name())
	delete(t.endToEnd, c)
	s.listed = true
}

// finished records the end-to-end latency of finished messages, if Config.EndToEnd is set.
// Requires: mu held.
func (t *Topic) finished(now mono.Time, c *queue.Channel, messages []*queue.Message) {
	span := t.shared.cfg.EndToEnd
	if span == 0 || len(messages) == 0 {
		return
	}
	w := t.endToEnd[c]
	if w == nil {
		if t.endToEnd == nil {
			t.endToEnd = make(map[*queue.Channel]*stats.Window)
		}
		w = new(stats.Window)
		t.endToEnd[c] = w
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
	err := t.onChannel(name, func(now mono.Time, c *queue.Channel, s *step) {
		t.mu.core.EmptyChannel(now, c, &s.fx)
	})
	return errors.Join(err, t.store.settled())
}

// PauseChannel stops the channel's deliveries. Errors: ErrUnknownChannel, ErrDraining,
// ErrStorage.
func (t *Topic) PauseChannel(name string) error {
	return t.orderedChannel(name, func(c *metadata.Channel) bool {
		c.Paused = true
		return true
	}, func(_ mono.Time, c *queue.Channel, _ *step) { c.Pause() })
}

// UnpauseChannel resumes deliveries. Errors: ErrUnknownChannel, ErrDraining, ErrStorage.
func (t *Topic) UnpauseChannel(name string) error {
	return t.orderedChannel(name, func(c *metadata.Channel) bool {
		c.Paused = false
		return true
	}, func(now mono.Time, c *queue.Channel, s *step) { t.mu.core.UnpauseChannel(now, c, &s.fx) })
}
