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

// brokerView is what the brokers of a topic answered.
type brokerView struct {
	Topic    channelSum
	Channels []channelSum
	Senders  []sender // at most maxShown
	Answered int
	Silent   string // why a broker did not answer
}

// heldBy requests a topic's channels and publishers from its brokers.
func (a *requester) heldBy(ctx context.Context, topic string) (h brokerView) {
	if a.transport == nil {
		return h
	}
	brokers, _, err := a.holders(ctx, topic)
	if err != nil {
		h.Silent = problemOf(err).text
		return h
	}
	type answer struct {
		id string
		brokerStats
		err error
	}
	channels := map[string]channelSum{}
	for _, answer := range each(brokers, func(id, address string) (answer answer) {
		answer.id = id
		answer.brokerStats, answer.err = a.stats(ctx, address, topic, "", true)
		return answer
	}) {
		if answer.err != nil {
			h.Silent = problemOf(answer.err).text
			continue
		}
		h.Answered++
		for _, t := range answer.Topics {
			h.Topic.Depth += t.Depth
			h.Topic.Expired += t.SRTM.Expired
			h.Topic.countPaused(t.Paused)
			for _, ch := range t.Channels {
				s := channels[ch.Name]
				s.add(ch)
				channels[ch.Name] = s
			}
		}
		for _, p := range answer.Producers {
			for _, n := range p.Published {
				if n.Topic == topic {
					h.Senders = append(h.Senders, sender{client: p, Broker: answer.id, Count: n.Count})
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(channels)) {
		s := channels[name]
		s.Name = name
		h.Channels = append(h.Channels, s)
	}
	slices.SortStableFunc(h.Senders, func(a, b sender) int { return cmp.Compare(b.Count, a.Count) })
	h.Senders = h.Senders[:min(len(h.Senders), maxShown)]
	return h
}

// add adds one broker's part of a channel.
func (s *channelSum) add(ch brokerChannel) {
	s.Depth += ch.Depth
	s.InFlight += ch.InFlight
	s.Deferred += ch.Deferred
	s.Clients += ch.ClientCount
	s.Expired += ch.SRTM.Expired
	s.GivenUp += ch.SRTM.GivenUp
	s.DeadLettered += ch.SRTM.DeadLettered
	s.countPaused(ch.Paused)
}

func (s *channelSum) countPaused(paused bool) {
	if s.Brokers++; paused {
		s.PausedOn++
	}
}
