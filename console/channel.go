package console

import (
	"context"
	"fmt"
	"net/url"
)

// holder is one broker's data of a channel.
type holder struct {
	Broker  string
	Trouble string // "": the broker answered
	brokerChannel
}

type channelData struct {
	Topic, Channel string
	Holders        []holder
	Paused         bool // on all answering brokers
	Depth          int
	InFlight       int
	Deferred       int
	Consumers      int
	Expiry         string // in force on the first answering broker
	Cluster        bool
}

// channel shows a channel on all brokers of its topic.
func (c *Console) channel(ctx context.Context, q url.Values, _ user) (view, error) {
	d := channelData{Topic: q.Get("topic"), Channel: q.Get("channel"), Cluster: c.cfg.API != nil}
	present, paused := 0, 0
	brokers, _, err := c.requester.holders(ctx, d.Topic)
	if err != nil {
		return view{}, err
	}
	d.Holders = each(brokers, func(id, address string) holder {
		h := holder{Broker: id, Trouble: "it has no such channel"}
		s, err := c.requester.stats(ctx, address, d.Topic, d.Channel, true)
		if err != nil {
			h.Trouble = err.Error()
		}
		for _, t := range s.Topics {
			for _, ch := range t.Channels {
				h.Trouble, h.brokerChannel = "", ch
				h.Clients = h.Clients[:min(len(h.Clients), maxShown)]
			}
		}
		return h
	})
	for _, h := range d.Holders {
		if h.Trouble != "" {
			continue
		}
		if present++; h.Paused {
			paused++
		}
		if present == 1 {
			d.Expiry = h.SRTM.Expiry.Text()
		}
		d.Depth += h.Depth
		d.Consumers += h.ClientCount
		d.InFlight += h.InFlight
		d.Deferred += h.Deferred
	}
	d.Paused = present > 0 && paused == present
	return view{Template: "channel", Title: fmt.Sprintf("Channel %s of %s", d.Channel, d.Topic), Crumbs: crumbs(c.clustered(), d.Topic), Data: d}, nil
}

// crumbs returns the pages above a page of a topic.
func crumbs(clustered bool, topic string) []link {
	if !clustered {
		return []link{{"Broker", "/ui/"}}
	}
	return []link{{"Topics", "/ui/topics"}, {topic, query("/ui/topic", "name", topic)}}
}
