package catalog

import (
	"cmp"
	"fmt"
	"slices"
)

// Channels belong to the topic: every broker of the topic has all of them. The catalog has the
// durable channels, the declared ones and those that brokers have reported. Ephemeral channels
// stay with their broker.

// MaxChannels is how many durable channels a topic may have.
const MaxChannels = 10_000

// Channel is a durable channel of a topic.
type Channel struct {
	Name string
	// Created is the version that the channel came with. It tells channels of one name apart:
	// a broker that was told of a smaller one has a channel that was deleted since.
	Created uint64
	Paused  bool
}

// ChannelsCreated: a topic has these durable channels, too. Those that it has already stay as
// they are. Created is set when the event is applied.
type ChannelsCreated struct {
	Topic    string
	Channels []Channel // with distinct names
}

// ChannelsPaused: these channels of a topic are paused, or are not, as each says.
type ChannelsPaused struct {
	Topic    string
	Channels []Channel // by name and Paused
}

// ChannelsDeleted: a topic does not have these channels any more.
type ChannelsDeleted struct {
	Topic    string
	Channels []Channel // by name
}

// ChannelsChanged: these channels of the topic are others than before, or gone.
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

// Channel returns the channel of that name; false: the topic has no such durable channel.
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

// lives returns the topic of an event about its channels.
func (c *Catalog) lives(doing, name string) (*topic, error) {
	t, err := c.known(doing, name)
	if err == nil && t.phase == Deleting {
		err = fmt.Errorf("%s topic %s, which is %v: %w", doing, name, t.phase, ErrTopicState)
	}
	return t, err
}

func (e ChannelsCreated) apply(c *Catalog) ([]Effect, error) {
	t, err := c.lives("create channels of", e.Topic)
	if err != nil {
		return nil, err
	}
	var fresh []Channel
	for _, one := range e.Channels {
		if _, found := find(t.channels, one.Name); found {
			continue
		}
		if one.Name == "" {
			return nil, fmt.Errorf("create channels of topic %s: one has no name", e.Topic)
		}
		fresh = append(fresh, Channel{one.Name, c.version, one.Paused})
	}
	return t.add(fresh)
}

// add gives the topic channels that it does not have. Requires: their names are distinct.
func (t *topic) add(fresh []Channel) ([]Effect, error) {
	if len(fresh) == 0 {
		return nil, nil
	}
	if len(t.channels)+len(fresh) > MaxChannels {
		return nil, &ChannelsError{t.spec.Name(), len(t.channels), len(fresh)}
	}
	names := make([]string, len(fresh))
	for i, one := range fresh {
		names[i] = one.Name
	}
	slices.Sort(names)
	if len(slices.Compact(slices.Clone(names))) < len(names) {
		return nil, fmt.Errorf("create channels of topic %s: a name appears twice", t.spec.Name())
	}
	// Readers have the present slice.
	all := slices.Concat(t.channels, fresh)
	slices.SortFunc(all, func(a, b Channel) int { return cmp.Compare(a.Name, b.Name) })
	t.channels = all
	return []Effect{ChannelsChanged{t.spec.Name(), names}}, nil
}

// present returns the topic of an event, and where its channels are.
func (c *Catalog) present(doing, name string, channels []Channel) (t *topic, at []int, err error) {
	if t, err = c.lives(doing, name); err != nil {
		return nil, nil, err
	}
	for _, one := range channels {
		i, found := position(t.channels, one.Name)
		if !found {
			return nil, nil, fmt.Errorf("%s topic %s: %q: %w", doing, name, one.Name, ErrChannelUnknown)
		}
		at = append(at, i)
	}
	return t, at, nil
}

func (e ChannelsPaused) apply(c *Catalog) ([]Effect, error) {
	t, at, err := c.present("pause channels of", e.Topic, e.Channels)
	if err != nil {
		return nil, err
	}
	all, names := slices.Clone(t.channels), []string(nil)
	for n, i := range at {
		if all[i].Paused != e.Channels[n].Paused {
			all[i].Paused = e.Channels[n].Paused
			names = append(names, all[i].Name)
		}
	}
	if names == nil {
		return nil, nil
	}
	t.channels = all
	return []Effect{ChannelsChanged{e.Topic, names}}, nil
}

func (e ChannelsDeleted) apply(c *Catalog) ([]Effect, error) {
	t, at, err := c.present("delete channels of", e.Topic, e.Channels)
	if err != nil {
		return nil, err
	}
	gone := map[string]bool{}
	for _, i := range at {
		gone[t.channels[i].Name] = true
	}
	t.channels = slices.DeleteFunc(slices.Clone(t.channels), func(one Channel) bool { return gone[one.Name] })
	return []Effect{ChannelsChanged{e.Topic, sorted(gone)}}, nil
}
