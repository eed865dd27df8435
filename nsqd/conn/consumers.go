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
	// nudgePatience bounds the wait for a consumer to finish its messages. nudgePause is the time
	// between two checks.
	nudgePatience = time.Second
	nudgePause    = 5 * time.Millisecond
	// nudgeHold is how long an ephemeral channel outlives its last nudged consumer, so that the
	// consumer can reconnect.
	nudgeHold = 3 * time.Second
)

// looksUpAgain reports, from the user agent, whether a consumer looks up its topic as soon as a
// connection ends. go-nsq does if it uses nsqlookupd. nsqjs and pynsq only look up at their poll
// interval, so a nudge would interrupt their delivery.
func looksUpAgain(userAgent string) bool { return strings.Contains(userAgent, "go-nsq/") }

// NudgeConsumers makes consumers of the given channels look up their topic again, by closing their
// connections. It returns the number of consumers to nudge and does not wait for them.
//
// A consumer is nudged if its library looks up at once (looksUpAgain) and its connection is older than
// NudgeAfter. The broker sends a nudged consumer no more messages. If the consumer finishes its
// messages within nudgePatience, the broker closes the connection; otherwise delivery resumes. The
// second half of each channel's consumers is nudged half a second after the first half is done,
// because go-nsq needs 0.1 s to reconnect. NudgeConsumers keeps ephemeral channels alive meanwhile.
func (s *Server) NudgeConsumers(topic string, channels map[string]bool) int {
	byChannel := map[string][]*client{}
	n := 0
	since := time.Now().Add(-s.cfg.NudgeAfter)
	s.clients.each(func(c *client) {
		sub, id := c.stats.sub.Load(), c.stats.identity.Load()
		if sub != nil && sub.local() != nil && sub.topic == topic && channels[sub.channel] && id != nil && looksUpAgain(id.UserAgent) && !c.quitting.Load() &&
			!c.stats.connected.After(since) {
			byChannel[sub.channel] = append(byChannel[sub.channel], c)
			n++
		}
	})
	var first, second []*client
	var ephemeral []string
	for channel, clients := range byChannel {
		half := (len(clients) + 1) / 2
		first, second = append(first, clients[:half]...), append(second, clients[half:]...)
		if wire.Ephemeral(channel) {
			ephemeral = append(ephemeral, channel)
		}
	}
	if n == 0 || !s.clients.spawn(func() {
		for _, sub := range s.keepAlive(topic, ephemeral) {
			defer sub.Close()
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

// keepAlive subscribes to channels without taking messages, which keeps the channels alive.
func (s *Server) keepAlive(topic string, channels []string) []*broker.Subscription {
	var subs []*broker.Subscription
	for _, channel := range channels {
		t, err := s.broker.Topic([]byte(topic))
		if err != nil {
			break // the topic was deleted
		}
		if sub, err := t.Subscribe(channel, broker.Subscriber{MsgTimeout: time.Minute}, func() {}); err == nil {
			subs = append(subs, sub)
		} // on an error the channel has too many consumers, and ends with them
	}
	return subs
}

// nudge ends connections once they hold no message. If a connection still holds messages after
// nudgePatience, nudge restores its RDY.
func (s *Server) nudge(clients []*client) {
	ready := make(map[*client]int, len(clients))
	for left := nudgePatience; ; left -= nudgePause {
		clients = slices.DeleteFunc(clients, func(c *client) bool {
			n, idle := c.stats.sub.Load().local().Rest()
			if n > 0 { // the RDY before the nudge, or a newer RDY of the client
				ready[c] = n
			}
			if idle {
				c.quit()
			}
			return idle
		})
		if len(clients) == 0 || left <= 0 || !clock.Sleep(s.ctx, nudgePause) {
			break
		}
	}
	for _, c := range clients {
		if n := ready[c]; n > 0 { // 0: another nudge is under way and restores RDY
			_ = c.stats.sub.Load().local().Ready(n) // an error means that the subscription has ended
		}
	}
}
