package conformance

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// held returns a subscriber that holds a message, RDY at 1.
func held(t *testing.T, n *node) (topic string, c *peer, m delivery) {
	t.Helper()
	topic = n.topic()
	c = n.consumer(t, topic, "ch").rdy(1)
	n.publish(t, topic, "x")
	return topic, c, c.body("x")
}

func TestFin(t *testing.T) {
	group(t)
	check(t, "ends the message", func(t *testing.T) {
		n := common(t)
		topic, c, m := held(t, n)
		c.fin(m.id)
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.InFlight == 0 && s.Depth == 0 })
		c.quiet()
	})
	check(t, "twice", func(t *testing.T) {
		n := common(t)
		_, c, m := held(t, n)
		c.fin(m.id)
		c.fin(m.id)
		if text := c.fault("E_FIN_FAILED"); !strings.Contains(text, m.id) {
			t.Errorf("text %q does not name the message", text)
		}
		c.alive(n)
	})
	check(t, "of another's message", func(t *testing.T) {
		n := common(t)
		topic, c, m := held(t, n)
		other := n.consumer(t, topic, "ch")
		other.fin(m.id)
		other.fault("E_FIN_FAILED")
		c.fin(m.id)
		c.alive(n)
	})
	check(t, "of a message of another channel", func(t *testing.T) {
		n := common(t)
		topic, _, m := held(t, n)
		other := n.consumer(t, topic, "other").rdy(1)
		other.fin(m.id)
		other.fault("E_FIN_FAILED")
		other.alive(n)
	})
	check(t, "after REQ", func(t *testing.T) {
		n := common(t)
		_, c, m := held(t, n)
		c.req(m.id, maxDelay)
		c.fin(m.id)
		c.fault("E_FIN_FAILED")
		c.alive(n)
	})
}

// The three commands about a message take its id alike.
func TestMessageID(t *testing.T) {
	group(t)
	for verb, rest := range map[string]string{"FIN": "", "REQ": " 0", "TOUCH": ""} {
		check(t, verb+" of an unknown id is not fatal", func(t *testing.T) {
			n := common(t)
			c := n.consumer(t, n.topic(), "ch")
			for range 3 {
				c.send("%s %s%s\n", verb, noID, rest)
				if text := c.fault("E_" + verb + "_FAILED"); !strings.Contains(text, noID) {
					t.Errorf("text %q does not name the message", text)
				}
			}
			c.alive(n)
		})
		for _, id := range []string{noID[1:], noID + "f", "x"} {
			check(t, fmt.Sprintf("%s of an id of %d bytes", verb, len(id)), func(t *testing.T) {
				n := common(t)
				c := n.consumer(t, n.topic(), "ch")
				c.send("%s %s%s\n", verb, id, rest)
				c.fatal("E_INVALID")
			})
		}
		check(t, verb+" of 16 bytes that are no id", func(t *testing.T) {
			n := common(t)
			c := n.consumer(t, n.topic(), "ch")
			c.send("%s %s%s\n", verb, "zzzzzzzzzzzzzzzz", rest)
			c.fault("E_" + verb + "_FAILED")
			c.alive(n)
		})
		check(t, verb+" of nothing", func(t *testing.T) {
			n := common(t)
			c := n.consumer(t, n.topic(), "ch")
			c.send("%s\n", verb)
			c.fatal("E_INVALID")
		})
	}
}

func TestReq(t *testing.T) {
	group(t)
	check(t, "0 is at once", func(t *testing.T) {
		n := common(t)
		topic, c, m := held(t, n)
		c.req(m.id, 0)
		again := c.body("x")
		if again.id != m.id || again.attempts != 2 || !again.stamp.Equal(m.stamp) {
			t.Errorf("got %+v after %+v", again, m)
		}
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.RequeueCount == 1 && s.InFlight == 1 && s.MessageCount == 1 })
	})
	check(t, "a delay is waited for", func(t *testing.T) {
		const delay = 400 * time.Millisecond
		n := common(t)
		_, c, m := held(t, n)
		start := time.Now()
		c.req(m.id, delay)
		again := c.body("x")
		if waited := time.Since(start); waited < delay {
			t.Errorf("came after %v, want %v", waited, delay)
		}
		if again.attempts != 2 {
			t.Errorf("attempts %d", again.attempts)
		}
	})
	check(t, "goes to any consumer", func(t *testing.T) {
		n := common(t)
		topic, c, m := held(t, n)
		other := n.consumer(t, topic, "ch").rdy(1)
		c.rdy(0)
		c.req(m.id, 0)
		if again := other.body("x"); again.attempts != 2 {
			t.Errorf("attempts %d", again.attempts)
		}
	})
	check(t, "a late one counts as deferred and does not hold up others", func(t *testing.T) {
		n := common(t)
		topic, c, m := held(t, n)
		c.req(m.id, maxDelay)
		n.settle(t, topic, "ch", func(s channelStats) bool {
			return s.Deferred == 1 && s.InFlight == 0 && s.Depth == 0 && s.RequeueCount == 1
		})
		n.publish(t, topic, "next")
		c.body("next")
	})
	check(t, "attempts count on", func(t *testing.T) {
		n := common(t)
		_, c, m := held(t, n)
		for want := uint16(2); want <= 20; want++ {
			c.req(m.id, 0)
			if m = c.body("x"); m.attempts != want {
				t.Fatalf("attempts %d, want %d", m.attempts, want)
			}
		}
	})
	check(t, "twice", func(t *testing.T) {
		n := common(t)
		_, c, m := held(t, n)
		c.req(m.id, maxDelay)
		c.req(m.id, 0)
		c.fault("E_REQ_FAILED")
		c.alive(n)
	})
	for _, delay := range []string{"x", "1.5", "1e3"} {
		check(t, "delay "+delay, func(t *testing.T) {
			n := common(t)
			_, c, m := held(t, n)
			c.send("REQ %s %s\n", m.id, delay)
			c.fatal("E_INVALID")
		})
	}
	check(t, "delay -1", func(t *testing.T) {
		n := common(t)
		_, c, m := held(t, n)
		c.send("REQ %s -1\n", m.id)
		if unlike(t, "req-negative") {
			c.body("x")
		} else {
			c.fatal("E_INVALID")
		}
	})
	check(t, "without a delay", func(t *testing.T) {
		n := common(t)
		_, c, m := held(t, n)
		c.send("REQ %s\n", m.id)
		c.fatal("E_INVALID")
	})
	check(t, "a delay over the maximum is cut", func(t *testing.T) {
		const longest = time.Second
		n := start(t, "--max-req-timeout="+longest.String())
		_, c, m := held(t, n)
		begin := time.Now()
		c.req(m.id, time.Hour)
		c.body("x")
		if waited := time.Since(begin); waited < longest {
			t.Errorf("came after %v, want %v", waited, longest)
		}
	})
}

func TestTimeout(t *testing.T) {
	group(t)
	const timeout = 2 * time.Second
	// hasty returns a subscriber with a short timeout.
	hasty := func(t *testing.T, n *node, topic string) *peer {
		c := n.open(t)
		c.identify(map[string]any{"msg_timeout": timeout.Milliseconds(), "output_buffer_timeout": 25})
		return c.sub(topic, "ch")
	}
	check(t, "comes again", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := hasty(t, n, topic)
		n.publish(t, topic, "x")
		n.depth(t, topic, "ch", 1)
		start := time.Now()
		m := c.rdy(1).message()
		again := c.body("x")
		if waited := time.Since(start); waited < timeout {
			t.Errorf("came again after %v, want %v", waited, timeout)
		}
		if again.id != m.id || again.attempts != 2 {
			t.Errorf("got %+v after %+v", again, m)
		}
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.TimeoutCount >= 1 && s.RequeueCount == 0 && s.MessageCount == 1 })
	})
	check(t, "FIN comes too late", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := hasty(t, n, topic).rdy(1)
		n.publish(t, topic, "x")
		m := c.message()
		c.rdy(0)
		other := n.consumer(t, topic, "ch")
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.TimeoutCount == 1 })
		c.fin(m.id)
		c.fault("E_FIN_FAILED")
		c.alive(n)
		if again := other.rdy(1).body("x"); again.attempts != 2 {
			t.Errorf("attempts %d", again.attempts)
		}
	})
	check(t, "another consumer gets it", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := hasty(t, n, topic).rdy(1)
		n.publish(t, topic, "x")
		c.message()
		c.rdy(0)
		n.consumer(t, topic, "ch").rdy(1).body("x")
	})
	check(t, "by flag", func(t *testing.T) {
		n := start(t, "--msg-timeout=500ms")
		topic, c, m := held(t, n)
		if again := c.body("x"); again.id != m.id || again.attempts != 2 {
			t.Errorf("got %+v", again)
		}
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.TimeoutCount >= 1 })
	})
	check(t, "TOUCH puts it off", func(t *testing.T) {
		const timeout = 3 * time.Second // so that no slow machine misses it between two of them
		n := common(t)
		topic := n.topic()
		c := n.open(t)
		c.identify(map[string]any{"msg_timeout": timeout.Milliseconds(), "output_buffer_timeout": 25})
		c.sub(topic, "ch").rdy(1)
		n.publish(t, topic, "x")
		m := c.message()
		var touched time.Time
		// The loop lasts longer than the timeout: without effect, the message
		// would come again in it.
		for end := time.Now().Add(timeout + timeout/4); time.Now().Before(end); {
			touched = time.Now()
			c.touch(m.id)
			c.quiet()
		}
		again := c.body("x")
		if waited := time.Since(touched); waited < timeout {
			t.Errorf("came again %v after TOUCH, want %v", waited, timeout)
		}
		if again.attempts != 2 {
			t.Errorf("attempts %d", again.attempts)
		}
	})
	check(t, "TOUCH, then FIN", func(t *testing.T) {
		n := common(t)
		topic, c, m := held(t, n)
		c.touch(m.id)
		c.fin(m.id)
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.InFlight == 0 && s.Depth == 0 })
		c.touch(m.id)
		c.fault("E_TOUCH_FAILED")
	})
	check(t, "TOUCH of another's message", func(t *testing.T) {
		n := common(t)
		topic, _, m := held(t, n)
		other := n.consumer(t, topic, "ch")
		other.touch(m.id)
		other.fault("E_TOUCH_FAILED")
		other.alive(n)
	})
	check(t, "TOUCH helps no longer than --max-msg-timeout", func(t *testing.T) {
		const most = 1500 * time.Millisecond
		n := start(t, "--msg-timeout=1s", "--max-msg-timeout="+most.String())
		begin := time.Now()
		topic, c, m := held(t, n)
		for {
			c.touch(m.id)
			f, err := c.read(silence)
			if err != nil {
				if time.Since(begin) > patience {
					t.Fatal("the message never timed out")
				}
				continue
			}
			if f.kind != message {
				t.Fatalf("got %v", f)
			}
			break
		}
		if waited := time.Since(begin); waited < most {
			t.Errorf("timed out after %v, want %v", waited, most)
		}
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.TimeoutCount >= 1 })
	})
}

func TestCls(t *testing.T) {
	group(t)
	check(t, "ends deliveries, not the connection", func(t *testing.T) {
		n := common(t)
		topic, c, m := held(t, n)
		c.send("CLS\n")
		c.response("CLOSE_WAIT")
		n.publish(t, topic, "more")
		c.fin(m.id)
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.InFlight == 0 && s.Depth == 1 })
		c.quiet()
		c.alive(n)
	})
	check(t, "REQ and TOUCH still work", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(2)
		n.publish(t, topic, "a", "b")
		a, b := c.message(), c.message()
		c.send("CLS\n")
		c.response("CLOSE_WAIT")
		c.touch(a.id)
		c.req(b.id, 0)
		n.consumer(t, topic, "ch").rdy(1).body(b.body)
		c.fin(a.id)
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.InFlight == 1 && s.RequeueCount == 1 })
	})
	check(t, "RDY is ignored", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch")
		c.send("CLS\n")
		c.response("CLOSE_WAIT")
		c.rdy(1)
		n.publish(t, topic, "x")
		n.depth(t, topic, "ch", 1)
		c.quiet()
	})
	check(t, "what is not finished goes to another", func(t *testing.T) {
		n := start(t, "--msg-timeout=1s")
		topic, c, _ := held(t, n)
		c.send("CLS\n")
		c.response("CLOSE_WAIT")
		c.nc.Close()
		n.consumer(t, topic, "ch").rdy(1).body("x")
	})
	for _, verb := range []string{"CLS", "SUB t ch"} {
		check(t, "then "+verb, func(t *testing.T) {
			n := common(t)
			c := n.consumer(t, n.topic(), "ch")
			c.send("CLS\n")
			c.response("CLOSE_WAIT")
			c.send("%s\n", verb)
			c.fatal("E_INVALID")
		})
	}
}

func TestHeartbeat(t *testing.T) {
	group(t)
	const interval = time.Second
	// beating returns a connection with heartbeats, and a moment before nsqd
	// knew that it wants them.
	beating := func(t *testing.T) (*node, *peer, time.Time) {
		n := common(t)
		p := n.open(t)
		p.beats = true
		before := time.Now()
		p.identify(map[string]any{"heartbeat_interval": interval.Milliseconds()})
		return n, p, before
	}
	check(t, "comes at the interval asked for", func(t *testing.T) {
		_, p, start := beating(t)
		for range 3 {
			p.response(heartbeat)
			p.send("NOP\n")
		}
		if waited := time.Since(start); waited < 3*interval {
			t.Errorf("3 heartbeats in %v", waited)
		}
	})
	check(t, "any command keeps the connection", func(t *testing.T) {
		n, p, _ := beating(t)
		topic := n.topic()
		for beats, oks := 0, 0; oks < 4; {
			switch f := p.next(); string(f.data) {
			case heartbeat:
				p.raw(sized("PUB "+topic, "x"))
				beats++
			case "OK":
				if oks++; oks > beats {
					t.Fatalf("%d times OK for %d commands", oks, beats)
				}
			default:
				t.Fatalf("got %v", f)
			}
		}
	})
	check(t, "a client that does not answer is closed", func(t *testing.T) {
		_, p, start := beating(t)
		beats := 0
		for {
			f, err := p.read(patience)
			if ended(err) {
				break
			}
			if err != nil || string(f.data) != heartbeat {
				t.Fatalf("got %v, %v", f, err)
			}
			beats++
		}
		if waited := time.Since(start); beats < 1 || waited < 2*interval {
			t.Errorf("closed after %d heartbeats and %v", beats, waited)
		}
	})
	check(t, "a subscriber that does not answer is closed, its messages go on", func(t *testing.T) {
		n, p, _ := beating(t)
		topic := n.topic()
		p.beats = false // one may come before the OK
		p.sub(topic, "ch").rdy(1)
		p.beats = true
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.ClientCount == 0 })
		p.hungUp()
		n.publish(t, topic, "x")
		n.consumer(t, topic, "ch").rdy(1).body("x")
	})
	check(t, "none with -1", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		p.beats = true
		p.identify(map[string]any{"heartbeat_interval": -1})
		_, q, _ := beating(t)
		for range 3 { // so long the other would have been closed
			q.response(heartbeat)
			q.send("NOP\n")
		}
		p.alive(n)
	})
	check(t, "subscriber gets messages and heartbeats", func(t *testing.T) {
		n, p, _ := beating(t)
		topic := n.topic()
		p.beats = false // one may come before the OK
		p.sub(topic, "ch").rdy(1)
		p.beats = true
		for messages := 0; messages < 2; {
			switch f := p.next(); {
			case f.kind == message:
				messages++
				p.fin(string(f.data[10:26]))
			case string(f.data) == heartbeat:
				p.send("NOP\n")
				n.publish(t, topic, "x")
			default:
				t.Fatalf("got %v", f)
			}
		}
	})
}

func TestOutputBuffer(t *testing.T) {
	group(t)
	// RDY stays above what comes: with nothing more allowed, any nsqd flushes.
	slow := func(t *testing.T, fields map[string]any) (*node, string, *peer) {
		n := common(t)
		topic := n.topic()
		c := n.open(t)
		c.identify(fields)
		return n, topic, c.sub(topic, "ch").rdy(100)
	}
	check(t, "a message that is alone", func(t *testing.T) {
		n, topic, c := slow(t, map[string]any{"output_buffer_timeout": 30_000, "output_buffer_size": 65536})
		n.publish(t, topic, "x")
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.InFlight == 1 })
		if unlike(t, "eager-flush") {
			c.body("x")
		} else {
			c.quiet()
		}
	})
	check(t, "is written when the timeout is over", func(t *testing.T) {
		n, topic, c := slow(t, map[string]any{"output_buffer_timeout": 500, "output_buffer_size": 65536})
		n.publish(t, topic, "x")
		c.body("x")
	})
	check(t, "is written when the size is reached", func(t *testing.T) {
		n, topic, c := slow(t, map[string]any{"output_buffer_timeout": 30_000, "output_buffer_size": 1000})
		body := strings.Repeat("x", 600)
		n.publish(t, topic, body, body)
		c.body(body)
	})
	check(t, "size -1 is none", func(t *testing.T) {
		n, topic, c := slow(t, map[string]any{"output_buffer_size": -1, "output_buffer_timeout": 30_000})
		n.publish(t, topic, "at once")
		c.body("at once")
	})
	check(t, "timeout -1 waits for the size", func(t *testing.T) {
		n, topic, c := slow(t, map[string]any{"output_buffer_timeout": -1})
		n.publish(t, topic, "x")
		if unlike(t, "eager-flush") {
			c.body("x")
		} else {
			c.quiet()
		}
	})
	check(t, "strict", func(t *testing.T) {
		if !under.srtm {
			t.Skip("--output-buffering is SRTM's")
		}
		n := start(t, "--output-buffering=strict")
		topic := n.topic()
		c := n.open(t)
		c.identify(map[string]any{"output_buffer_timeout": 1000, "output_buffer_size": 65536})
		c.sub(topic, "ch").rdy(100)
		n.publish(t, topic, "x")
		n.settle(t, topic, "ch", func(s channelStats) bool { return s.InFlight == 1 })
		c.quiet()
		c.body("x")
	})
	check(t, "replies do not wait", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		p.identify(map[string]any{"output_buffer_timeout": 30_000, "output_buffer_size": 65536})
		p.sub(n.topic(), "ch")
		p.alive(n)
		p.fin(noID)
		p.fault("E_FIN_FAILED")
	})
}

func TestSampling(t *testing.T) {
	group(t)
	check(t, "takes a part, and nobody gets the rest", func(t *testing.T) {
		const messages = 2000
		n := common(t)
		topic := n.topic()
		c := n.open(t)
		c.identify(map[string]any{"sample_rate": 20, "output_buffer_timeout": 25})
		c.sub(topic, "ch").rdy(2500)
		p := n.open(t)
		for range messages / 100 {
			p.mpub(topic, slices.Repeat([]string{"x"}, 100)...)
		}
		got := 0
		n.settle(t, topic, "ch", func(s channelStats) bool {
			got = s.InFlight
			return s.MessageCount == messages && s.Depth == 0
		})
		// 20 % of 2000 +- 10 standard deviations of 18
		if got < 220 || got > 580 {
			t.Errorf("%d of %d messages were delivered, want about 400", got, messages)
		}
		for range got {
			c.message()
		}
		c.quiet()
	})
}
