package conformance

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// numbered returns so many different bodies, sorted.
func numbered(count int) (bodies []string) {
	for i := range count {
		bodies = append(bodies, fmt.Sprintf("%05d", i))
	}
	return bodies
}

// again ends n in good order and starts another nsqd in its folder, with its flags.
func (n *node) again(t *testing.T) *node {
	t.Helper()
	testkit.Must(t, n.end())
	return startIn(t, n.process.Dir, n.process.Flags...)
}

func TestOverflow(t *testing.T) {
	group(t)
	for _, memory := range []int{0, 1, 10} {
		check(t, fmt.Sprintf("mem-queue-size %d", memory), func(t *testing.T) {
			n := start(t, fmt.Sprintf("--mem-queue-size=%d", memory))
			topic := n.topic()
			c := n.consumer(t, topic, "ch")
			const messages = 500
			want := numbered(messages)
			p := n.open(t)
			for i := 0; i < messages; i += 50 {
				p.mpub(topic, want[i:i+50]...)
			}
			n.depth(t, topic, "ch", messages)
			s, _ := mustLookup(t, n, topic).channel("ch")
			if s.BackendDepth < messages-memory-10 || s.BackendDepth > messages {
				t.Errorf("backend_depth is %d of %d", s.BackendDepth, messages)
			}
			if got := c.rdy(100).bodies(messages); !slices.Equal(got, want) {
				t.Errorf("got %d bodies, not those published", len(got))
			}
			n.settle(t, topic, "ch", func(s channelStats) bool { return s.Depth == 0 && s.BackendDepth == 0 })
		})
	}
	check(t, "of a topic without a channel", func(t *testing.T) {
		n := start(t, "--mem-queue-size=10")
		topic := n.topic()
		want := numbered(100)
		n.open(t).mpub(topic, want...)
		if s := mustLookup(t, n, topic); s.Depth != 100 || s.BackendDepth < 80 {
			t.Errorf("got %+v", s)
		}
		testkit.EqualSlices(t, n.consumer(t, topic, "ch").rdy(100).bodies(100), want)
	})
	check(t, "in many files", func(t *testing.T) {
		n := start(t, "--mem-queue-size=1", "--max-bytes-per-file=2000", "--max-msg-size=500")
		topic := n.topic()
		c := n.consumer(t, topic, "ch")
		var want []string
		for i := range 100 {
			want = append(want, fmt.Sprintf("%03d %s", i, strings.Repeat("x", i)))
		}
		n.publish(t, topic, want...)
		n.depth(t, topic, "ch", 100)
		testkit.EqualSlices(t, c.rdy(10).bodies(100), want)
	})
}

func TestRestart(t *testing.T) {
	group(t)
	for _, flags := range [][]string{nil, {"--mem-queue-size=3"}} {
		check(t, fmt.Sprintf("messages, flags %q", flags), func(t *testing.T) {
			n := start(t, append(flags, "--msg-timeout=10s")...)
			want := numbered(20)
			c := n.consumer(t, "t", "ch").rdy(3)
			n.consumer(t, "t", "other")
			n.publish(t, "t", want...)
			held := []delivery{c.message(), c.message(), c.message()} // stay in flight
			c.rdy(2)
			c.req(held[0].id, 2*time.Second) // deferred: upstream forgets until when
			n.settle(t, "t", "ch", func(s channelStats) bool { return s.Deferred == 1 && s.InFlight == 2 && s.Depth == 17 })
			n.publish(t, "u", want...) // a topic without a channel
			n = n.again(t)
			for topic, channel := range map[string]string{"t": "ch", "u": "new"} {
				got := n.consumer(t, topic, channel).rdy(100).bodies(20)
				if slices.Sort(got); !slices.Equal(got, want) { // deferred messages still come last
					t.Errorf("%s/%s: got %q", topic, channel, got)
				}
			}
			testkit.EqualSlices(t, n.consumer(t, "t", "other").rdy(100).bodies(20), want, "t/other")
		})
	}
	check(t, "data-path", func(t *testing.T) {
		dir := t.TempDir()
		n := start(t, "--data-path="+dir)
		n.publish(t, "t", "x")
		testkit.Must(t, n.end())
		if files, err := os.ReadDir(dir); err != nil || len(files) == 0 {
			t.Errorf("nothing was written there: %v, %v", files, err)
		}
		n = start(t, "--data-path="+dir)
		n.consumer(t, "t", "ch").rdy(1).body("x")
	})
	check(t, "data-path that does not exist", func(t *testing.T) {
		startFails(t, "--data-path=/does/not/exist")
	})
	check(t, "data-path in use", func(t *testing.T) {
		dir := t.TempDir()
		start(t, "--data-path="+dir)
		startFails(t, "--data-path="+dir)
	})
}

func TestShutdown(t *testing.T) {
	group(t)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		check(t, sig.String(), func(t *testing.T) {
			n := start(t)
			idle, publisher, consumer := n.open(t), n.open(t), n.consumer(t, "t", "ch").rdy(1)
			idle.identify(nil)
			publisher.pub("t", "x")
			consumer.fin(consumer.message().id)
			n.depth(t, "t", "ch", 0)
			testkit.Must(t, n.process.Signal(sig))
			for _, p := range []*peer{idle, publisher, consumer} {
				p.hungUp()
			}
			select {
			case <-n.process.Done():
				if err := n.process.Err(); err != nil {
					t.Errorf("exit: %v", err)
				}
			case <-time.After(2 * patience):
				t.Error("it still serves")
			}
		})
	}
	check(t, "leaves the ports", func(t *testing.T) {
		n := start(t)
		testkit.Must(t, n.end())
		for _, address := range []string{n.tcp, n.http} {
			ln := testkit.Result(net.Listen("tcp", address)).Must(t)
			ln.Close()
		}
	})
}
