package conformance

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Limits that the documentation gives as defaults.
const (
	maxMessage = 1 << 20
	maxBody    = 5 << 20
	maxDelay   = time.Hour
)

func TestPub(t *testing.T) {
	group(t)
	check(t, "message frame", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(1)
		before := time.Now()
		n.publish(t, topic, "body")
		after := time.Now()
		m := c.body("body")
		if m.stamp.Before(before) || m.stamp.After(after) {
			t.Errorf("timestamp %v is outside [%v, %v]", m.stamp, before, after)
		}
		if m.attempts != 1 {
			t.Errorf("attempts %d, want 1", m.attempts)
		}
		if _, err := hex.DecodeString(m.id); err != nil || strings.ToLower(m.id) != m.id {
			t.Errorf("id %q is not 16 lower-case hexadecimal digits", m.id)
		}
	})
	check(t, "ids are unique", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		const messages = 2000
		c := n.consumer(t, topic, "ch").rdy(100)
		p := n.open(t)
		for range messages / 100 {
			p.mpub(topic, slices.Repeat([]string{"x"}, 100)...)
		}
		ids := map[string]bool{}
		for range messages {
			m := c.message()
			c.fin(m.id)
			if ids[m.id] {
				t.Fatalf("id %s twice", m.id)
			}
			ids[m.id] = true
		}
	})
	check(t, "any bytes", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		all := make([]byte, 256)
		for i := range all {
			all[i] = byte(i)
		}
		c := n.consumer(t, topic, "ch").rdy(1)
		n.publish(t, topic, string(all))
		c.body(string(all))
	})
	check(t, "body that looks like commands", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(1)
		body := "BAD\nCLS\n  V2\nPUB x\n"
		n.publish(t, topic, body)
		c.body(body)
	})
	check(t, "sizes 1 and max", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(1)
		p := n.open(t)
		for _, body := range []string{"1", strings.Repeat("m", maxMessage)} {
			p.pub(topic, body)
			c.fin(c.body(body).id)
		}
	})
	for name, size := range map[string]int32{"0": 0, "-1": -1, "max + 1": maxMessage + 1, "least": -1 << 31} {
		check(t, "size "+name, func(t *testing.T) {
			n := common(t)
			topic := n.topic()
			p := n.open(t)
			p.raw(claimed("PUB "+topic, size, ""))
			p.fatal("E_BAD_MESSAGE")
		})
	}
	check(t, "a refused one is followed by none", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		p := n.open(t)
		p.raw(append(sized("PUB "+topic, "kept"), claimed("PUB "+topic, 0, "")...))
		p.ok()
		p.fatal("E_BAD_MESSAGE")
		if s, _ := n.lookup(t, topic); s.MessageCount != 1 {
			t.Errorf("%d messages were accepted, want 1", s.MessageCount)
		}
	})
	check(t, "creates the topic, without a channel", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		n.publish(t, topic, "abc")
		s, exists := n.lookup(t, topic)
		if !exists || len(s.Channels) != 0 || s.Depth != 1 || s.MessageCount != 1 || s.MessageBytes != 3 {
			t.Errorf("exists: %t, %+v", exists, s)
		}
	})
	check(t, "without a topic", func(t *testing.T) {
		p := common(t).open(t)
		p.send("PUB\n")
		p.fatal("E_INVALID")
	})
	check(t, "while subscribed", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch")
		c.pub(topic, "to myself")
		c.rdy(1).body("to myself")
	})
	check(t, "many in one write", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		var all []byte
		for i := range 1000 {
			all = append(all, sized("PUB "+topic, fmt.Sprint(i))...)
		}
		p := n.open(t)
		p.raw(all)
		p.oks(1000)
		if s, _ := n.lookup(t, topic); s.MessageCount != 1000 {
			t.Errorf("message_count %d", s.MessageCount)
		}
	})
}

func TestMpub(t *testing.T) {
	group(t)
	check(t, "each message once", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(10)
		n.open(t).mpub(topic, "a", "b", "c")
		if got := c.bodies(3); !slices.Equal(got, []string{"a", "b", "c"}) {
			t.Errorf("got %q", got)
		}
		c.quiet()
	})
	check(t, "of one", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(1)
		n.open(t).mpub(topic, "single")
		c.body("single")
	})
	check(t, "body of the maximum size", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		var bodies []string
		left := maxBody - 4
		for left > 0 {
			size := min(maxMessage, left-4)
			bodies = append(bodies, strings.Repeat("x", size))
			left -= size + 4
		}
		n.open(t).mpub(topic, bodies...)
		if s, _ := n.lookup(t, topic); s.MessageCount != len(bodies) {
			t.Errorf("message_count %d, want %d", s.MessageCount, len(bodies))
		}
	})
	check(t, "without a topic", func(t *testing.T) {
		p := common(t).open(t)
		p.send("MPUB\n")
		p.fatal("E_INVALID")
	})
	number := func(of ...int32) string {
		var b []byte
		for _, v := range of {
			b = binary.BigEndian.AppendUint32(b, uint32(v))
		}
		return string(b)
	}
	for name, c := range map[string]struct {
		size       int32
		body, code string
	}{
		"body of 0":             {0, "", "E_BAD_BODY"},
		"body of -1":            {-1, "", "E_BAD_BODY"},
		"body over the maximum": {maxBody + 1, "", "E_BAD_BODY"},
		"no messages":           {4, number(0), "E_BAD_BODY"},
		"-1 messages":           {8, number(-1, 0), "E_BAD_BODY"},
		"message of 0":          {8, number(1, 0), "E_BAD_MESSAGE"},
		"message of -1":         {8, number(1, -1), "E_BAD_MESSAGE"},
		"second message of 0":   {17, number(2, 1) + "x" + number(0) + "rest", "E_BAD_MESSAGE"},
	} {
		check(t, name, func(t *testing.T) {
			n := common(t)
			topic := n.topic()
			p := n.open(t)
			p.raw(claimed("MPUB "+topic, c.size, c.body))
			p.fatal(c.code)
			if s, _ := n.lookup(t, topic); s.MessageCount != 0 {
				t.Errorf("%d messages of it were accepted", s.MessageCount)
			}
		})
	}
	for name, c := range map[string]struct{ count, size int32 }{
		"more messages than fit":                   {1 + (maxBody-4)/5, 1},
		"message over the maximum, its size alone": {1, maxMessage + 1},
	} {
		check(t, name, func(t *testing.T) {
			n := common(t)
			p := n.open(t)
			p.raw(claimed("MPUB "+n.topic(), 8, number(c.count, c.size)))
			if c.count == 1 {
				p.fatal("E_BAD_MESSAGE")
			} else {
				p.fatal("E_BAD_BODY")
			}
		})
	}
	for name, body := range map[string]string{
		"more messages than came":      number(2, 1) + "x",
		"message of which a part came": number(1, 5) + "ab",
		"less than the count came":     "abc",
		"count of a million":           number(1_000_000, 1) + "x",
	} {
		check(t, name, func(t *testing.T) {
			n := common(t)
			topic := n.topic()
			p := n.open(t)
			p.raw(sized("MPUB "+topic, body))
			p.quiet()
			if s, _ := n.lookup(t, topic); s.MessageCount != 0 {
				t.Errorf("%d messages of it were accepted", s.MessageCount)
			}
		})
	}
	// Client libraries leave the count, or the sizes, out of the body's size.
	body := batch("one", "two")
	for name, size := range map[string]int{
		"without the count":     len(body) - 4,
		"without the sizes":     len(body) - 8,
		"of the messages alone": len(body) - 12,
		"of a byte less":        len(body) - 1,
		"of 1":                  1,
		"with its own 4 bytes":  len(body) + 4,
		"of the maximum":        maxBody,
	} {
		check(t, "body size "+name, func(t *testing.T) {
			n := common(t)
			topic := n.topic()
			c := n.consumer(t, topic, "ch").rdy(10)
			p := n.open(t)
			p.raw(claimed("MPUB "+topic, int32(size), body))
			p.ok()
			p.raw(append(claimed("MPUB "+topic, int32(size), body), sized("PUB "+topic, "three")...))
			p.oks(2)
			if got := c.bodies(5); !slices.Equal(got, []string{"one", "one", "three", "two", "two"}) {
				t.Errorf("got %q", got)
			}
		})
	}
	check(t, "rest of a body is commands", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		p.raw(sized("MPUB "+n.topic(), number(1, 1)+"xyz"))
		p.ok()
		p.send("NOP\n") // comes behind the rest of the body
		p.fatal("E_INVALID")
	})
	check(t, "messages over the maximum together", func(t *testing.T) {
		n := start(t, "--max-body-size=1000")
		topic := n.topic()
		all := slices.Repeat([]string{strings.Repeat("x", 79)}, 12) // 4 + 12 x 83 = 1000
		p := n.open(t)
		p.raw(claimed("MPUB "+topic, 1, batch(all...)))
		p.ok()
		p.raw(claimed("MPUB "+topic, 1, batch(append(all, "y")...)))
		want := 12
		if unlike(t, "mpub-total") {
			p.fatal("E_BAD_BODY")
		} else {
			p.ok()
			want += 13
		}
		if s, _ := n.lookup(t, topic); s.MessageCount != want {
			t.Errorf("message_count %d, want %d", s.MessageCount, want)
		}
	})
}

func TestDpub(t *testing.T) {
	group(t)
	const delay = 400 * time.Millisecond
	check(t, "not before its time", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(10)
		start := time.Now()
		p := n.open(t)
		p.dpub(topic, delay, "later")
		p.pub(topic, "now")
		if m := c.notBefore(start, delay, "later", "now"); m.attempts != 1 {
			t.Errorf("attempts %d, want 1", m.attempts)
		}
	})
	check(t, "0 is now", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(1)
		n.open(t).dpub(topic, 0, "now")
		c.body("now")
	})
	check(t, "in the order of their times", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		c := n.consumer(t, topic, "ch").rdy(10)
		p := n.open(t)
		var all []byte // in one write: their times count from when nsqd reads them
		for _, m := range []struct{ ms, body string }{{"2600", "third"}, {"200", "first"}, {"1400", "second"}} {
			all = append(all, sized("DPUB "+topic+" "+m.ms, m.body)...)
		}
		p.raw(all)
		p.oks(3)
		for _, want := range []string{"first", "second", "third"} {
			c.fin(c.body(want).id)
		}
	})
	check(t, "counts as deferred, not as depth", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		n.consumer(t, topic, "ch")
		n.open(t).dpub(topic, maxDelay, "much later")
		n.settle(t, topic, "ch", func(c channelStats) bool {
			return c.Deferred == 1 && c.Depth == 0 && c.InFlight == 0 && c.MessageCount == 1
		})
	})
	check(t, "in every channel", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		a, b := n.consumer(t, topic, "a").rdy(1), n.consumer(t, topic, "b").rdy(1)
		n.open(t).dpub(topic, delay, "later")
		a.body("later")
		b.body("later")
	})
	for _, ms := range []string{"-1", "x", "1.5", "3600001", "99999999999999999999"} {
		check(t, "delay "+ms, func(t *testing.T) {
			n := common(t)
			topic := n.topic()
			p := n.open(t)
			p.raw(claimed("DPUB "+topic+" "+ms, 1, "x"))
			p.fatal("E_INVALID")
			if s, _ := n.lookup(t, topic); s.MessageCount != 0 {
				t.Errorf("%d messages were accepted", s.MessageCount)
			}
		})
	}
	check(t, "without a delay", func(t *testing.T) {
		n := common(t)
		p := n.open(t)
		p.raw(claimed("DPUB "+n.topic(), 1, "x"))
		p.fatal("E_INVALID")
	})
	for name, size := range map[string]int32{"0": 0, "-1": -1, "max + 1": maxMessage + 1} {
		check(t, "size "+name, func(t *testing.T) {
			n := common(t)
			p := n.open(t)
			p.raw(claimed("DPUB "+n.topic()+" 0", size, ""))
			p.fatal("E_BAD_MESSAGE")
		})
	}
}

func TestNames(t *testing.T) {
	group(t)
	commands := func(name string) map[string][]byte {
		return map[string][]byte{
			"PUB":         sized("PUB "+name, "x"),
			"MPUB":        sized("MPUB "+name, batch("x")),
			"DPUB":        sized("DPUB "+name+" 0", "x"),
			"SUB topic":   []byte("SUB " + name + " ch\n"),
			"SUB channel": []byte(fmt.Sprintf("SUB names%d %s\n", birth, name)),
		}
	}
	for _, name := range []string{
		"a", "A.b-C_9", ".", "-", "_", "0", strings.Repeat("a", 64), "x#ephemeral", strings.Repeat("a", 54) + "#ephemeral",
	} {
		for verb, command := range commands(name) {
			check(t, verb+" takes "+name, func(t *testing.T) {
				p := common(t).open(t)
				p.raw(command)
				p.ok()
			})
		}
	}
	for _, name := range []string{
		strings.Repeat("a", 65), "", "#ephemeral", "a#eph", "a#EPHEMERAL", "a#ephemeral#ephemeral", "a/b", "a*", "ä", "a\tb", "a\x00b", "a,b",
		strings.Repeat("a", 55) + "#ephemeral", strings.Repeat("a", 200),
	} {
		for verb, command := range commands(name) {
			check(t, fmt.Sprintf("%s refuses %q", verb, name), func(t *testing.T) {
				p := common(t).open(t)
				p.raw(command)
				if verb == "SUB channel" {
					p.fatal("E_BAD_CHANNEL")
				} else {
					p.fatal("E_BAD_TOPIC")
				}
			})
		}
	}
}

func TestSizeFlags(t *testing.T) {
	group(t)
	check(t, "limits of sizes by flag", func(t *testing.T) {
		n := start(t, "--max-msg-size=100", "--max-body-size=1000", "--max-req-timeout=2s")
		topic := n.topic()
		n.publish(t, topic, strings.Repeat("x", 100))
		n.open(t).mpub(topic, slices.Repeat([]string{strings.Repeat("x", 79)}, 12)...) // 4 + 12 x 83 = 1000
		refused := func(command []byte, code string) {
			t.Helper()
			p := n.open(t)
			p.raw(command)
			p.fatal(code)
		}
		refused(claimed("PUB "+topic, 101, ""), "E_BAD_MESSAGE")
		refused(claimed("DPUB "+topic+" 0", 101, ""), "E_BAD_MESSAGE")
		refused(claimed("MPUB "+topic, 1001, ""), "E_BAD_BODY")
		refused(sized("MPUB "+topic, batch("x", strings.Repeat("x", 101))), "E_BAD_MESSAGE")
		refused(claimed("IDENTIFY", 1001, ""), "E_BAD_BODY")
		refused(claimed("DPUB "+topic+" 2001", 1, "x"), "E_INVALID")
		n.open(t).dpub(topic, 2*time.Second, "x")
		if s, _ := n.lookup(t, topic); s.MessageCount != 14 {
			t.Errorf("message_count %d, want 14", s.MessageCount)
		}
	})
}

// SRTM's own refusals: a client keeps its connection.
func TestRefusals(t *testing.T) {
	group(t)
	check(t, "over the contract's rate", func(t *testing.T) {
		if !unlike(t, "rate-limit") {
			n := common(t)
			n.publish(t, n.topic(), numbered(1000)...)
			return
		}
		n := start(t, "--topic-limit=t:1000000:1:reject")
		n.does(t, "/topic/limit?topic=t&rate=0.001&burst=1&policy=reject") // it has its token by now
		p := n.open(t)
		p.pub("t", "takes the token")
		for _, command := range [][]byte{sized("PUB t", "x"), sized("MPUB t", batch("x", "y")), sized("DPUB t 0", "x")} {
			p.raw(command)
			if text := p.fault("E_RATE_LIMITED"); !regexp.MustCompile(`^retry_after_ms=[1-9][0-9]*$`).MatchString(text) {
				t.Errorf("text %q does not say when to retry", text)
			}
		}
		p.alive(n)
		n.post(t, "/pub?topic=t", "x").refused(t, 429, "RATE_LIMITED")
		if s := mustLookup(t, n, "t"); s.MessageCount != 1 {
			t.Errorf("got %+v", s)
		}
		n.consumer(t, "t", "ch").rdy(10).body("takes the token")
	})
	check(t, "more than fits into memory", func(t *testing.T) {
		n := start(t, "--mem-queue-size=5")
		topic := n.topic()
		p := n.open(t)
		p.pub(topic, numbered(5)...)
		for _, command := range [][]byte{sized("PUB "+topic, "x"), sized("MPUB "+topic, batch("x", "y")), sized("DPUB "+topic+" 0", "x")} {
			p.raw(command)
			p.ok()
		}
		n.consumer(t, topic, "ch").rdy(10).bodies(9)
	})
	check(t, "more than fits, of an ephemeral topic", func(t *testing.T) {
		n := start(t, "--mem-queue-size=5")
		topic := n.topic() + "#ephemeral"
		p := n.open(t)
		p.pub(topic, numbered(5)...)
		for _, command := range [][]byte{sized("PUB "+topic, "x"), sized("MPUB "+topic, batch("x", "y")), sized("DPUB "+topic+" 0", "x")} {
			p.raw(command)
			if unlike(t, "queue-full") {
				p.fault("E_QUEUE_FULL")
			} else {
				p.ok()
			}
		}
		if unlike(t, "queue-full") {
			n.post(t, "/pub?topic="+strings.ReplaceAll(topic, "#", "%23"), "x").refused(t, 503, "QUEUE_FULL")
		}
		c := n.consumer(t, topic, "ch").rdy(10)
		if got := c.bodies(5); !slices.Equal(got, numbered(5)) {
			t.Errorf("got %q", got)
		}
		p.pub(topic, "fits again")
		c.body("fits again")
	})
	check(t, "more than fits on the disk", func(t *testing.T) {
		n := start(t, "--mem-queue-size=5", "--data-path="+testkit.SmallDisk(t, 1<<20))
		topic := n.topic()
		n.does(t, "/topic/create?topic="+topic)
		p := n.open(t)
		large := strings.Repeat("x", 10_000)
		refused := false
		for range 500 {
			p.raw(sized("PUB "+topic, large))
			f := p.next()
			if f.kind == response {
				continue
			}
			refused = true
			if unlike(t, "queue-full") {
				if !strings.HasPrefix(string(f.data), "E_QUEUE_FULL") {
					t.Errorf("got %q", f.data)
				}
				p.alive(n)
				n.post(t, "/pub?topic="+topic, large).refused(t, 503, "QUEUE_FULL")
			} else {
				if !strings.HasPrefix(string(f.data), "E_PUB_FAILED") {
					t.Errorf("got %q", f.data)
				}
				p.closed()
			}
			break
		}
		if !refused {
			t.Error("a megabyte takes five")
		}
		if r := n.get(t, "/ping"); r.status != 500 || !strings.HasPrefix(r.body, "NOK - ") {
			t.Errorf("ping: %+v", r)
		}
		n.does(t, "/topic/delete?topic="+topic) // so that it can end well: it has room for the rest
	})
}
