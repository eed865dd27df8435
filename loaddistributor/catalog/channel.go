package catalog

import (
	"cmp"
	"fmt"
	"slices"
)

// Channels belong to the topic: every broker of the topic has all of them. The catalog
// keeps the durable channels, both declared channels and channels reported by brokers.
// Ephemeral channels stay with their broker.

// MaxChannels is the maximum number of durable channels of a topic.
const MaxChannels = 10_000

// Channel is a durable channel of a topic.
type Channel struct {
	Name string
	// Created is the version of the channel's creation. It distinguishes successive
	// channels of the same name: a broker with a smaller version has a deleted channel.
	Created uint64
	Paused  bool
	// Session is the broker with the latest kept session of the MQTT client whose channel this is.
	// Empty: no broker has claimed the channel.
	Session string
}

// ChannelsCreated adds durable channels to a topic. Existing channels stay unchanged.
// Apply sets Created.
type ChannelsCreated struct {
	Topic    string
	Channels []Channel // with distinct names
}

// ChannelsSet sets Paused and Session of channels of a topic.
type ChannelsSet struct {
	Topic    string
	Channels []Channel // without Created
}

// ChannelsDeleted removes channels of a topic.
type ChannelsDeleted struct {
	Topic    string
	Channels []Channel // by name
}

// ChannelsChanged means that these channels of the topic were added, changed or removed.
type ChannelsChanged struct {
	Topic string
	Names []string
}

func (ChannelsChanged) effect() {}

// ChannelsError: the topic would have more channels than MaxChannels.
type ChannelsError struct {
	Topic        string
	Present, New int
}

func (e *ChannelsError) Error() string {
	return fmt.Sprintf("topic %s has %d channels, of at most %d: %d more do not fit; delete those that no consumer needs", e.Topic, e.Present, MaxChannels, e.New)
}

// Channel returns the durable channel of the given name; false if the topic has no such
// channel.
func (t *Topic) Channel(name string) (Channel, bool) { return find(t.Channels, name) }

func position(channels []Channel, name string) (int, bool) {
	return slices.BinarySearchFunc(channels, name, func(c Channel, name string) int { return cmp.Compare(c.Name, name) })
}

func find(channels []Channel, name string) (Channel, bool) {
	i, found := position(channels, name)
	if !found {
		return Channel{}, false
	}
	return channels[i], true
}

// liveTopic returns the topic of a channel event. It refuses a topic in state Deleting.
func (c *Catalog) liveTopic(action, name string) (*topic, error) {
	t, err := c.mustTopic(action, name)
	if err == nil && t.phase == Deleting {
		err = fmt.Errorf("%s topic %s, which is %v: %w", action, name, t.phase, ErrTopicState)
	}
	return t, err
}

func (e ChannelsCreated) apply(c *Catalog) ([]Effect, error) {
	t, err := c.liveTopic("create channels of", e.Topic)
	if err != nil {
		return nil, err
	}
	var fresh []Channel
	for _, channel := range e.Channels {
		if _, found := find(t.channels, channel.Name); found {
			continue
		}
		if channel.Name == "" {
			return nil, fmt.Errorf("create channels of topic %s: one has no name", e.Topic)
		}
		fresh = append(fresh, Channel{Name: channel.Name, Created: c.version, Paused: channel.Paused})
	}
	return t.add(fresh)
}

// add adds the channels to the topic. Requires: the topic has none of them.
func (t *topic) add(fresh []Channel) ([]Effect, error) {
	if len(fresh) == 0 {
		return nil, nil
	}
	if len(t.channels)+len(fresh) > MaxChannels {
		return nil, &ChannelsError{t.spec.Name(), len(t.channels), len(fresh)}
	}
	names := make([]string, len(fresh))
	for i, channel := range fresh {
		names[i] = channel.Name
	}
	slices.Sort(names)
	if len(slices.Compact(slices.Clone(names))) < len(names) {
		return nil, fmt.Errorf("create channels of topic %s: a name appears twice", t.spec.Name())
	}
	// Readers hold the present slice, so add builds a new slice.
	all := slices.Concat(t.channels, fresh)
	slices.SortFunc(all, func(a, b Channel) int { return cmp.Compare(a.Name, b.Name) })
	t.channels = all
	return []Effect{ChannelsChanged{t.spec.Name(), names}}, nil
}

// present returns the topic of an event and the positions of its channels.
func (c *Catalog) present(action, name string, channels []Channel) (t *topic, indices []int, err error) {
	if t, err = c.liveTopic(action, name); err != nil {
		return nil, nil, err
	}
	for _, channel := range channels {
		i, found := position(t.channels, channel.Name)
		if !found {
			return nil, nil, fmt.Errorf("%s topic %s: %q: %w", action, name, channel.Name, ErrChannelUnknown)
		}
		indices = append(indices, i)
	}
	return t, indices, nil
}

func (e ChannelsSet) apply(c *Catalog) ([]Effect, error) {
	t, indices, err := c.present("change channels of", e.Topic, e.Channels)
	if err != nil {
		return nil, err
	}
	all, names := slices.Clone(t.channels), []string(nil)
	for n, i := range indices {
		if all[i].Paused != e.Channels[n].Paused {
			names = append(names, all[i].Name)
		}
		all[i].Paused, all[i].Session = e.Channels[n].Paused, e.Channels[n].Session
	}
	t.channels = all
	if names == nil { // brokers need not know Session
		return nil, nil
	}
	return []Effect{ChannelsChanged{e.Topic, names}}, nil
}

func (e ChannelsDeleted) apply(c *Catalog) ([]Effect, error) {
	t, indices, err := c.present("delete channels of", e.Topic, e.Channels)
	if err != nil {
		return nil, err
	}
	removed := map[string]bool{}
	for _, i := range indices {
		removed[t.channels[i].Name] = true
	}
	t.channels = slices.DeleteFunc(slices.Clone(t.channels), func(channel Channel) bool { return removed[channel.Name] })
	return []Effect{ChannelsChanged{e.Topic, sorted(removed)}}, nil
}
