package console

import (
	"cmp"
	"context"
	"maps"
	"slices"
)

// channelSum is a channel on all answering brokers of its topic. Counts are since the
// start of each broker. The sum without a name is the topic itself: Depth are messages
// that wait for tokens or for a channel, Expired those given up there.
type channelSum struct {
	Name                               string
	Depth, InFlight, Deferred, Clients int
	Brokers, PausedOn                  int
	Expired, GivenUp, DeadLettered     uint64
}

// Paused reports whether the channel is paused on all its brokers.
func (s channelSum) Paused() bool { return s.Brokers > 0 && s.PausedOn == s.Brokers }

// sender is a connection that publishes to a topic.
type sender struct {
	client
	Broker   string
	Count    uint64  // messages
	Rate     float64 // msg/s; 0: unknown
	Together string  // correlation key
}

// held is what the brokers of a topic answered.
type held struct {
	Topic    channelSum
	Channels []channelSum
	Senders  []sender // at most maxShown
	Answered int
	Silent   string // why a broker did not answer
}

// heldBy asks the brokers of a topic for its channels and publishers.
func (a *asker) heldBy(ctx context.Context, topic string) (h held) {
	if a.by == nil {
		return h
	}
	found, err := a.holders(ctx, topic)
	if err != nil {
		h.Silent = problemOf(err).text
		return h
	}
	type answer struct {
		id string
		brokerStats
		err error
	}
	of := map[string]channelSum{}
	for _, one := range each(found, func(id, address string) (one answer) {
		one.id = id
		one.brokerStats, one.err = a.stats(ctx, address, topic, "", true)
		return one
	}) {
		if one.err != nil {
			h.Silent = problemOf(one.err).text
			continue
		}
		h.Answered++
		for _, t := range one.Topics {
			h.Topic.Depth += t.Depth
			h.Topic.Expired += t.SRTM.Expired
			for _, ch := range t.Channels {
				s := of[ch.Name]
				s.add(ch)
				of[ch.Name] = s
			}
		}
		for _, p := range one.Producers {
			for _, n := range p.Published {
				if n.Topic == topic {
					h.Senders = append(h.Senders, sender{client: p, Broker: one.id, Count: n.Count})
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(of)) {
		s := of[name]
		s.Name = name
		h.Channels = append(h.Channels, s)
	}
	slices.SortStableFunc(h.Senders, func(a, b sender) int { return cmp.Compare(b.Count, a.Count) })
	h.Senders = h.Senders[:min(len(h.Senders), maxShown)]
	return h
}

// add adds one broker's part of a channel.
func (s *channelSum) add(ch brokerChannel) {
	s.Depth += ch.Depth + ch.BackendDepth
	s.InFlight += ch.InFlight
	s.Deferred += ch.Deferred
	s.Clients += ch.ClientCount
	s.Expired += ch.SRTM.Expired
	s.GivenUp += ch.SRTM.GivenUp
	s.DeadLettered += ch.SRTM.DeadLettered
	if s.Brokers++; ch.Paused {
		s.PausedOn++
	}
}
