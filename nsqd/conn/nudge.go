package conn

import (
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

const (
	// nudgePatience bounds the wait for what a consumer holds, nudgePause is between
	// two looks.
	nudgePatience = time.Second
	nudgePause    = 5 * time.Millisecond
	// nudgeHold is how long an ephemeral channel outlives its last consumer that was
	// nudged, for that to come back.
	nudgeHold = 3 * time.Second
)

// asksAgain reports whether a consumer asks at once where its topic is when a
// connection ends, by its user agent. go-nsq does, if it asks nsqlookupd at all; nsqjs
// and pynsq go on asking at their interval only, and would have a gap until then.
func asksAgain(userAgent string) bool { return strings.Contains(userAgent, "go-nsq/") }

// NudgeConsumers has consumers of these channels of a topic ask again where it is, by
// ending their connections: of those that ask then (asksAgain), and that have answered
// what they hold within a second, during which they get nothing more; others stay.
// Half of a channel's consumers stay until half a second after that is done with the
// other half: go-nsq takes 0.1 s to come back. Connections younger than NudgeAfter stay.
// An ephemeral channel is kept meanwhile. It returns how many there are, and does not wait
// for them.
func (s *Server) NudgeConsumers(topic string, channels map[string]bool) int {
	of := map[string][]*client{}
	n := 0
	since := time.Now().Add(-s.cfg.NudgeAfter)
	s.clients.each(func(c *client) {
		sub, id := c.stats.sub.Load(), c.stats.identity.Load()
		if sub != nil && sub.local() != nil && sub.topic == topic && channels[sub.channel] && id != nil && asksAgain(id.UserAgent) && !c.quitting.Load() &&
			!c.stats.connected.After(since) {
			of[sub.channel] = append(of[sub.channel], c)
			n++
		}
	})
	var first, second []*client
	var ephemeral []string
	for channel, clients := range of {
		half := (len(clients) + 1) / 2
		first, second = append(first, clients[:half]...), append(second, clients[half:]...)
		if wire.Ephemeral(channel) {
			ephemeral = append(ephemeral, channel)
		}
	}
	if n == 0 || !s.clients.spawn(func() {
		for _, kept := range s.keep(topic, ephemeral) {
			defer kept.Close()
		}
		s.nudge(first)
		if len(second) > 0 && clock.Sleep(s.ctx, nudgePatience/2) {
			s.nudge(second)
		}
		if len(ephemeral) > 0 {
			clock.Sleep(s.ctx, nudgeHold)
		}
	}) {
		return 0
	}
	return n
}

// keep subscribes to channels without taking anything.
func (s *Server) keep(topic string, channels []string) []*broker.Subscription {
	var kept []*broker.Subscription
	for _, channel := range channels {
		t, err := s.broker.Topic([]byte(topic))
		if err != nil {
			break // it is gone
		}
		if sub, err := t.Subscribe(channel, broker.Subscriber{MsgTimeout: time.Minute}, func() {}); err == nil {
			kept = append(kept, sub)
		} // else it has as many consumers as it may: it ends with them
	}
	return kept
}

// nudge ends connections once they hold no message.
func (s *Server) nudge(clients []*client) {
	ready := make(map[*client]int, len(clients))
	for left := nudgePatience; ; left -= nudgePause {
		clients = slices.DeleteFunc(clients, func(c *client) bool {
			n, rests := c.stats.sub.Load().local().Rest()
			if n > 0 { // as it was, or as it has said meanwhile
				ready[c] = n
			}
			if rests {
				c.quit()
			}
			return rests
		})
		if len(clients) == 0 || left <= 0 || !clock.Sleep(s.ctx, nudgePause) {
			break
		}
	}
	for _, c := range clients {
		if n := ready[c]; n > 0 { // else another nudge is under way, which knows
			_ = c.stats.sub.Load().Ready(n) // it is gone otherwise
		}
	}
}
