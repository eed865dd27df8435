package conformance

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

func TestSub(t *testing.T) {
	group(t)
	check(t, "creates topic and channel", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		n.consumer(t, topic, "ch")
		n.settle(t, topic, "ch", func(c channelStats) bool { return c.ClientCount == 1 })
	})
	check(t, "starts with RDY at 0", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch")
		n.publish(t, topic, "x")
		n.depth(t, topic, "ch", 1)
		c.quiet()
		c.rdy(1).body("x")
	})
	check(t, "twice", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch")
		c.send("SUB %s other\n", topic)
		c.fatal("E_INVALID")
	})
	for name, line := range map[string]string{"nothing": "SUB", "no channel": "SUB t"} {
		check(t, "with "+name, func(t *testing.T) {
			p := common(t).open(t)
			p.send("%s\n", line)
			p.fatal("E_INVALID")
		})
	}
	check(t, "with heartbeats switched off", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		p.identify(map[string]any{"heartbeat_interval": -1})
		p.send("SUB %s ch\n", n.topic())
		p.fatal("E_INVALID")
	})
	for _, verb := range []string{"RDY 1", "FIN " + noID, "REQ " + noID + " 0", "TOUCH " + noID, "CLS"} {
		check(t, verb+" before SUB", func(t *testing.T) {
			p := common(t).open(t)
			p.send("%s\n", verb)
			p.fatal("E_INVALID")
		})
	}
	check(t, "a name that is not valid creates nothing", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		p := n.open(t)
		p.send("SUB %s bad*channel\n", topic)
		p.fatal("E_BAD_CHANNEL")
		if s, exists := n.lookup(t, topic); exists {
			t.Errorf("the topic exists: %+v", s)
		}
	})
}

func TestMaxChannelConsumers(t *testing.T) {
	group(t)
	check(t, "one more than --max-channel-consumers", func(t *testing.T) {
		n := start(t, "--max-channel-consumers=2")
		topic := n.topic()
		a := n.consumer(t, topic, "ch")
		n.consumer(t, topic, "ch")
		p := n.open(t)
		p.send("SUB %s ch\n", topic)
		p.fatal("E_SUB_FAILED")
		n.consumer(t, topic, "other")
		a.nc.Close()
		n.settle(t, topic, "ch", func(c channelStats) bool { return c.ClientCount == 1 })
		n.consumer(t, topic, "ch")
	})
}

func TestRdy(t *testing.T) {
	group(t)
	// fill returns a subscriber and publishes so many messages for it.
	fill := func(t *testing.T, messages int) (*node, string, *peer) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch")
		n.open(t).mpub(topic, slices.Repeat([]string{"x"}, messages)...)
		n.depth(t, topic, "ch", messages)
		return n, topic, c
	}
	take := func(c *peer, count int) (got []delivery) {
		for range count {
			got = append(got, c.message())
		}
		return got
	}
	check(t, "bounds what is in flight", func(t *testing.T) {
		n, topic, c := fill(t, 10)
		c.rdy(3)
		take(c, 3)
		c.quiet()
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.InFlight == 3 && s.Depth == 7 })
	})
	check(t, "each FIN lets the next one come", func(t *testing.T) {
		_, _, c := fill(t, 10)
		c.rdy(2)
		held := take(c, 2)
		for len(held) < 10 {
			c.fin(held[len(held)-2].id)
			held = append(held, c.message())
		}
		c.quiet()
	})
	check(t, "each REQ too", func(t *testing.T) {
		_, _, c := fill(t, 2)
		c.rdy(1)
		first := c.message()
		c.req(first.id, maxDelay)
		if second := c.message(); second.id == first.id {
			t.Errorf("the requeued message came before its time")
		}
	})
	check(t, "raised", func(t *testing.T) {
		_, _, c := fill(t, 10)
		take(c.rdy(1), 1)
		c.quiet()
		take(c.rdy(4), 3)
		c.quiet()
	})
	check(t, "lowered", func(t *testing.T) {
		_, _, c := fill(t, 10)
		held := take(c.rdy(4), 4)
		c.rdy(2)
		c.fin(held[0].id)
		c.fin(held[1].id)
		c.quiet()
		c.fin(held[2].id)
		take(c, 1)
		c.quiet()
	})
	check(t, "0 stops", func(t *testing.T) {
		_, _, c := fill(t, 10)
		held := take(c.rdy(2), 2)
		c.rdy(0)
		c.fin(held[0].id)
		c.fin(held[1].id)
		c.quiet()
		take(c.rdy(1), 1)
	})
	check(t, "without a number is 1", func(t *testing.T) {
		_, _, c := fill(t, 3)
		c.send("RDY\n")
		take(c, 1)
		c.quiet()
	})
	check(t, "greatest", func(t *testing.T) {
		_, _, c := fill(t, 1)
		take(c.rdy(2500), 1)
	})
	for _, count := range []string{"2501", "-1", "x", "1.5", "99999999999999999999"} {
		check(t, count, func(t *testing.T) {
			n := common(t)
			c := n.consumer(t, n.topic(), "ch")
			c.send("RDY %s\n", count)
			c.fatal("E_INVALID")
		})
	}
	check(t, "limit by flag", func(t *testing.T) {
		n := start(t, "--max-rdy-count=5")
		c := n.consumer(t, n.topic(), "ch").rdy(5)
		c.rdy(6)
		c.fatal("E_INVALID")
	})
	check(t, "in stats", func(t *testing.T) {
		n, topic, c := fill(t, 10)
		take(c.rdy(7), 7)
		n.settle(t, topic, "ch", func(s channelStats) bool {
			return len(s.Clients) == 1 && s.Clients[0].ReadyCount == 7 && s.Clients[0].InFlightCount == 7
		})
	})
}

func TestChannels(t *testing.T) {
	group(t)
	check(t, "each gets a copy", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		a, b := n.consumer(t, topic, "a").rdy(10), n.consumer(t, topic, "b").rdy(10)
		n.publish(t, topic, "1", "2", "3")
		want := []string{"1", "2", "3"}
		if got := a.bodies(3); !slices.Equal(got, want) {
			t.Errorf("a got %q", got)
		}
		if got := b.bodies(3); !slices.Equal(got, want) {
			t.Errorf("b got %q", got)
		}
	})
	check(t, "copies are finished apart", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		a, b := n.consumer(t, topic, "a").rdy(1), n.consumer(t, topic, "b").rdy(1)
		n.publish(t, topic, "x")
		a.fin(a.message().id)
		m := b.message()
		b.req(m.id, 0)
		if again := b.message(); again.attempts != 2 || again.id != m.id {
			t.Errorf("got %+v", again)
		}
		a.quiet()
	})
	check(t, "the first gets what waited in the topic", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		n.publish(t, topic, "early")
		n.consumer(t, topic, "first").rdy(1).body("early")
		n.consumer(t, topic, "second").rdy(1).quiet()
	})
	check(t, "keeps messages while nobody subscribes", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		n.consumer(t, topic, "ch").nc.Close()
		n.settle(t, topic, "ch", func(c channelStats) bool { return c.ClientCount == 0 })
		n.publish(t, topic, "x")
		n.depth(t, topic, "ch", 1)
		n.consumer(t, topic, "ch").rdy(1).body("x")
	})
	check(t, "a message goes to one of its consumers", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		const each, messages = 20, 40
		a, b := n.consumer(t, topic, "ch").rdy(each), n.consumer(t, topic, "ch").rdy(each)
		var want []string
		for i := range messages {
			want = append(want, fmt.Sprintf("%02d", i))
		}
		n.open(t).mpub(topic, want...)
		var got []string
		for range each {
			got = append(got, a.message().body, b.message().body)
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("got %q", got)
		}
		a.quiet()
		b.quiet()
	})
	check(t, "a consumer that is not ready does not hold up another", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		n.consumer(t, topic, "ch")
		busy := n.consumer(t, topic, "ch").rdy(1)
		n.publish(t, topic, "1", "2", "3")
		busy.bodies(3)
	})
	check(t, "what a consumer held goes to another when it leaves", func(t *testing.T) {
		const timeout = 3 * time.Second
		n := common(t)
		topic := n.topic()
		a := n.open(t)
		a.identify(map[string]any{"msg_timeout": timeout.Milliseconds(), "output_buffer_timeout": 25})
		a.sub(topic, "ch").rdy(2)
		start := time.Now()
		n.publish(t, topic, "1", "2")
		a.message()
		a.message()
		b := n.consumer(t, topic, "ch").rdy(2)
		a.nc.Close()
		for range 2 {
			if m := b.message(); m.attempts != 2 {
				t.Errorf("attempts %d, want 2", m.attempts)
			}
		}
		c, _ := mustLookup(t, n, topic).channel("ch")
		if unlike(t, "consumer-left") {
			if c.TimeoutCount != 0 {
				t.Errorf("came by a timeout: %+v", c)
			}
		} else if c.TimeoutCount != 2 || time.Since(start) < timeout {
			t.Errorf("came before the timeout: %+v", c)
		}
	})
	check(t, "counts in stats", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch")
		n.consumer(t, topic, "ch")
		n.publish(t, topic, "1", "2", "3")
		n.depth(t, topic, "ch", 3)
		c.rdy(1)
		m := c.message()
		n.settle(t, topic, "ch", func(s channelStats) bool {
			return s.Depth == 2 && s.InFlight == 1 && s.MessageCount == 3 && s.ClientCount == 2
		})
		c.rdy(0).fin(m.id)
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.Depth == 2 && s.InFlight == 0 && s.RequeueCount == 0 })
	})
}

func TestEphemeral(t *testing.T) {
	group(t)
	check(t, "a channel goes with its last consumer", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		a, b := n.consumer(t, topic, "ch#ephemeral"), n.consumer(t, topic, "ch#ephemeral")
		n.consumer(t, topic, "stays")
		a.nc.Close()
		n.settle(t, topic, "ch#ephemeral", func(c channelStats) bool { return c.ClientCount == 1 })
		b.nc.Close()
		eventually(t, func() string {
			s, _ := n.lookup(t, topic)
			if _, exists := s.channel("ch#ephemeral"); exists {
				return "the channel exists"
			}
			return ""
		})
		if s, _ := n.lookup(t, topic); len(s.Channels) != 1 {
			t.Errorf("channels: %+v", s.Channels)
		}
	})
	check(t, "a topic goes with its last channel", func(t *testing.T) {
		n := common(t)
		topic := n.topic() + "#ephemeral"
		c := n.consumer(t, topic, "ch#ephemeral")
		if _, exists := n.lookup(t, topic); !exists {
			t.Fatal("no topic after SUB")
		}
		c.nc.Close()
		eventually(t, func() string {
			if _, exists := n.lookup(t, topic); exists {
				return "the topic exists"
			}
			return ""
		})
	})
	check(t, "a topic stays with a channel that stays", func(t *testing.T) {
		n := common(t)
		topic := n.topic() + "#ephemeral"
		n.consumer(t, topic, "ch").nc.Close()
		n.settle(t, topic, "ch", func(c channelStats) bool { return c.ClientCount == 0 })
		if _, exists := n.lookup(t, topic); !exists {
			t.Error("the topic is gone")
		}
	})
	check(t, "a topic that nobody subscribed to stays", func(t *testing.T) {
		n := common(t)
		topic := n.topic() + "#ephemeral"
		n.publish(t, topic, "x")
		n.consumer(t, topic, "ch").rdy(1).body("x")
	})
	check(t, "a channel's name is free again", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		for i := range 20 {
			c := n.consumer(t, topic, "ch#ephemeral").rdy(1)
			body := fmt.Sprint(i)
			n.publish(t, topic, body)
			c.fin(c.body(body).id)
			c.send("CLS\n")
			c.response("CLOSE_WAIT")
			c.nc.Close()
			eventually(t, func() string {
				s, _ := n.lookup(t, topic)
				if _, exists := s.channel("ch#ephemeral"); exists {
					return "the channel exists"
				}
				return ""
			})
			// What came without a channel would wait for the next one.
			n.does(t, "/topic/empty?topic="+topic)
		}
	})
	check(t, "a full one drops", func(t *testing.T) {
		n := start(t, "--mem-queue-size=5")
		topic := n.topic() + "#ephemeral"
		c := n.consumer(t, topic, "ch#ephemeral")
		p := n.open(t)
		for i := range 50 {
			p.pub(topic, fmt.Sprint(i))
		}
		eventually(t, func() string {
			s, _ := n.lookup(t, topic)
			ch, _ := s.channel("ch#ephemeral")
			if s.Depth == 0 && ch.Depth <= 5 && ch.MessageCount >= 5 {
				return ""
			}
			return fmt.Sprintf("%+v", s)
		})
		c.rdy(1)
		c.fin(c.message().id)
	})
}
