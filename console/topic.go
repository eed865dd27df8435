package console

import (
	"context"
	"net/url"
	"slices"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/console/history"
	"github.com/srtm-io/srtm/console/why"
	"github.com/srtm-io/srtm/internal/topics"
)

// part is one broker's data of a topic.
type part struct {
	*srtmv1.BrokerTopicStatus
	Publishers uint32
	Wide       float64 // its share of the contract, in percent
	Offered    float32 // msg/s
	why.Latencies
}

// side is a topic on a page.
type side struct {
	Name string
	observed
	Verdict why.Verdict
	Penalty *why.Penalty
	Parts   []part
	Late    []stack
	Held    brokerView // on the page of one topic
}

// stack draws a part of a p99, in percent.
type stack struct {
	Name       string
	Value      float32 // ms
	From, Wide float64
}

// evaluate returns a topic with its evaluation.
func (c *Console) evaluate(ctx context.Context, name string) side {
	s := side{Name: name, observed: c.follow(ctx, name)}
	if s.Topic == nil {
		return s
	}
	s.Verdict = why.Judge(s.Topic)
	if p, ok := why.PenaltyOf(s.Topic); ok {
		s.Penalty = &p
	}
	contract := s.Topic.GetSpec().GetContract()
	publishers := map[string]uint32{}
	for _, q := range s.Topic.Quotas {
		publishers[q.BrokerId] = q.Publishers
	}
	for _, b := range s.Topic.GetStatus().GetBrokers() {
		p := part{BrokerTopicStatus: b, Publishers: publishers[b.BrokerId], Latencies: why.LatenciesOf(b.GetWindow())}
		p.Offered = float32(topics.PerSecond(b.GetWindow().GetOffered(), b.GetWindow()))
		if contract.GetRateMilli() > 0 {
			p.Wide = 100 * float64(b.GetShare().GetRateMilli()) / float64(contract.GetRateMilli())
		}
		s.Parts = append(s.Parts, p)
	}
	start := 0.0
	sum := float64(s.Last.Delays[history.Access].P99 + s.Last.Delays[history.Broker].P99 + s.Last.Delays[history.Consumer].P99)
	for i, name := range []string{"access", "broker", "consumer"} {
		value := s.Last.Delays[i].P99
		bar := stack{Name: name, Value: value, From: start}
		if sum > 0 {
			bar.Wide = 100 * float64(value) / sum
		}
		start += bar.Wide
		s.Late = append(s.Late, bar)
	}
	return s
}

// topic shows one topic.
func (c *Console) topic(ctx context.Context, q url.Values, _ user) (view, error) {
	s := c.evaluate(ctx, q.Get("name"))
	if s.Topic == nil {
		return view{}, &problem{404, s.Trouble}
	}
	if !s.Gone {
		s.Held = c.requester.heldBy(ctx, s.Name)
	}
	s.Held.addLearned(s.Topic.GetLearned())
	s.listChannels()
	return view{Template: "topic", Title: "Topic " + s.Name, Crumbs: []link{{"Topics", "/ui/topics"}}, Topics: []string{s.Name}, Data: s}, nil
}

// listChannels adds the channels of the specification that no broker has.
func (s *side) listChannels() {
	for _, name := range s.Topic.GetSpec().GetChannels() {
		if !slices.ContainsFunc(s.Held.Channels, func(c channelSum) bool { return c.Name == name }) {
			s.Held.Channels = append(s.Held.Channels, channelSum{Name: name})
		}
	}
}

// addLearned adds what the loaddistributor has learned of publishers.
func (h *brokerView) addLearned(l *srtmv1.Learned) {
	byID := map[string]*srtmv1.LearnedPublisher{}
	for _, p := range l.GetPublishers() {
		byID[p.Id] = p
	}
	for i := range h.Senders {
		if p := byID[h.Senders[i].ID]; p != nil {
			h.Senders[i].Rate, h.Senders[i].Together = p.Rate, p.CorrelationKey
		}
	}
}
