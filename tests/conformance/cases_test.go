package conformance

import (
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Cases that scripts cannot express.

// maxBody is the documented default.
const maxBody = 5 << 20

func TestPub(t *testing.T) {
	group(t)
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
		n.does(t, "/topic/limit?topic=t&rate=0.001&burst=1&policy=reject") // the topic has its token by now
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
		n.does(t, "/topic/delete?topic="+topic) // nsqd can then end in order, because the rest has room
	})
}

func TestHTTPPub(t *testing.T) {
	group(t)
	check(t, "chunked", func(t *testing.T) {
		n := common(t)
		topic := n.topic()
		nc := testkit.Result(net.DialTimeout("tcp", n.http, patience)).Must(t)
		defer nc.Close()
		fmt.Fprintf(nc, "POST /pub?topic=%s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n", topic)
		n.consumer(t, topic, "ch").rdy(1).body("abcdef")
	})
}

func TestChannels(t *testing.T) {
	group(t)
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
		testkit.EqualSlices(t, got, want)
		a.quiet()
		b.quiet()
	})
}

// held returns a subscriber that holds a message, with RDY at 1.
func held(t *testing.T, n *node) (topic string, c *peer, m delivery) {
	t.Helper()
	topic = n.topic()
	c = n.consumer(t, topic, "ch").rdy(1)
	n.publish(t, topic, "x")
	return topic, c, c.body("x")
}

func TestTimeout(t *testing.T) {
	group(t)
	check(t, "TOUCH puts it off", func(t *testing.T) {
		const timeout = 3 * time.Second // long enough for a slow machine to touch in time
		n := common(t)
		topic := n.topic()
		c := n.open(t)
		c.identify(map[string]any{"msg_timeout": timeout.Milliseconds(), "output_buffer_timeout": 25})
		c.sub(topic, "ch").rdy(1)
		n.publish(t, topic, "x")
		m := c.message()
		var touched time.Time
		// The loop lasts longer than the timeout. If TOUCH had no effect, the message would come again
		// within the loop.
		for end := time.Now().Add(timeout + timeout/4); time.Now().Before(end); {
			touched = time.Now()
			c.touch(m.id)
			c.quiet()
		}
		again := c.body("x")
		if waited := time.Since(touched); waited < timeout {
			t.Errorf("came again %v after TOUCH, want %v", waited, timeout)
		}
		testkit.Equal(t, again.attempts, 2, "attempts")
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

func TestHeartbeat(t *testing.T) {
	group(t)
	const interval = time.Second
	// beating returns a connection with heartbeats, and a time shortly before nsqd learned of the
	// heartbeat interval.
	beating := func(t *testing.T) (*node, *peer, time.Time) {
		n := common(t)
		p := n.open(t)
		p.beats = true
		before := time.Now()
		p.identify(map[string]any{"heartbeat_interval": interval.Milliseconds()})
		return n, p, before
	}
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
	check(t, "subscriber gets messages and heartbeats", func(t *testing.T) {
		n, p, _ := beating(t)
		topic := n.topic()
		p.beats = false // a heartbeat may come before the OK
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
}

func TestSampling(t *testing.T) {
	group(t)
	check(t, "takes a part, and no channel gets the rest", func(t *testing.T) {
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
