package broker

import (
	"fmt"
	"maps"

	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// expirySettings holds the expiry settings of a topic and its channels.
type expirySettings struct {
	topic    expiry.Settings
	channels map[string]expiry.Settings // includes channels that do not exist yet
}

// of returns the effective settings of a channel.
func (e *expirySettings) of(channel string) expiry.Settings {
	return e.channels[channel].Within(e.topic)
}

// set replaces the settings of a channel. The zero Settings remove them.
func (e *expirySettings) set(channel string, to expiry.Settings) {
	if !to.On() {
		delete(e.channels, channel)
		return
	}
	if e.channels == nil {
		e.channels = make(map[string]expiry.Settings)
	}
	e.channels[channel] = to
}

// recorded returns the settings for the metadata file.
func (e *expirySettings) recorded() (topic *expiry.Settings, channels map[string]expiry.Settings) {
	if e.topic.On() {
		own := e.topic
		topic = &own
	}
	return topic, maps.Clone(e.channels)
}

// validate returns an error if the settings are invalid for the named topic.
func (e *expirySettings) validate(topic string) error {
	if err := e.topic.Validate(topic); err != nil {
		return err
	}
	if e.topic.DeadLetter != "" && e.topic.MaxAttempts == 0 {
		return expiry.ErrNoAttempts
	}
	for name, own := range e.channels { // order: any fault is one
		if err := own.Validate(topic); err != nil {
			return fmt.Errorf("channel %q: %w", name, err)
		}
		if own.DeadLetter != "" && e.of(name).MaxAttempts == 0 {
			return fmt.Errorf("channel %q: %w", name, expiry.ErrNoAttempts)
		}
	}
	return nil
}

// expiries changes the expiry settings of a topic and its channels.
type expiries struct {
	// Set once.
	runner *runner
	orders *orders
}

func ofQueue(e expiry.Settings) queue.Expiry {
	return queue.Expiry{TTL: e.TTL, MaxAttempts: e.MaxAttempts, DeadLetters: e.DeadLetter != ""}
}

// SetExpiry sets when the topic gives messages up, including waiting messages. The zero
// Settings keep all messages. Error: the settings contradict each other or are out of
// range.
func (t *Topic) SetExpiry(to expiry.Settings) error {
	return t.expiry.expire(func(e *expirySettings) { e.topic = to })
}

// SetChannelExpiry sets when a channel gives messages up. The channel need not exist. With
// the zero Settings the topic's settings apply. Errors: as SetExpiry.
func (t *Topic) SetChannelExpiry(channel string, to expiry.Settings) error {
	return t.expiry.expire(func(e *expirySettings) { e.set(channel, to) })
}

// SetExpiries replaces the settings of the topic and all its channels. Errors: as
// SetExpiry.
func (t *Topic) SetExpiries(topic expiry.Settings, channels map[string]expiry.Settings) error {
	return t.expiry.expire(func(e *expirySettings) { e.topic, e.channels = topic, maps.Clone(channels) })
}

// expire applies a change completely or not at all. Errors: as validate; ErrStorage.
func (e *expiries) expire(change func(*expirySettings)) error {
	e.runner.mu.Lock()
	next, differs := e.expiryAfter(change)
	err := next.validate(e.runner.name)
	e.runner.mu.Unlock()
	if err != nil || !differs {
		return err
	}
	return e.orders.ordered(func(m *metadata.Topic) bool {
		next, _ := e.expiryAfter(change)
		m.Expiry, m.Expiries = next.recorded()
		return true
	}, func(now mono.Time, s *step) error {
		next, _ := e.expiryAfter(change)
		if err := next.validate(e.runner.name); err != nil || e.runner.mu.closed { // another order came first
			return err
		}
		e.runner.mu.expiry = next
		e.runner.mu.core.SetExpiry(now, ofQueue(next.topic), &s.fx)
		for _, c := range e.runner.mu.core.Channels() {
			e.applyExpiry(now, c, s)
		}
		return nil
	})
}

// expiryAfter returns the settings after a change, and whether they differ from the current
// settings. Requires: mu held.
func (e *expiries) expiryAfter(change func(*expirySettings)) (next expirySettings, differs bool) {
	next = expirySettings{e.runner.mu.expiry.topic, maps.Clone(e.runner.mu.expiry.channels)}
	change(&next)
	return next, next.topic != e.runner.mu.expiry.topic || !maps.Equal(next.channels, e.runner.mu.expiry.channels)
}

// applyExpiry applies a channel's own settings. Requires: mu held.
func (e *expiries) applyExpiry(now mono.Time, c *queue.Channel, s *step) {
	if own := ofQueue(e.runner.mu.expiry.channels[c.Name()]); own != c.Expiry() {
		e.runner.mu.core.SetChannelExpiry(now, c, own, &s.fx)
	}
}

// restoreExpiry restores the settings of an earlier process. The settings were valid.
func (e *expiries) restoreExpiry(topic *expiry.Settings, channels map[string]expiry.Settings) {
	var own expiry.Settings
	if topic != nil {
		own = *topic
	}
	_ = e.expire(func(e *expirySettings) { e.topic, e.channels = own, maps.Clone(channels) })
}
