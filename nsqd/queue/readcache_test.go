package queue

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// Channels that are close together read each message from disk once, at any pace. The cache is bounded, and is empty
// once all channels have had the messages.
func TestChannelsThatAreCloseTogetherReadOnce(t *testing.T) {
	const messages, size = 100, Overhead + 1
	for _, c := range []struct {
		ahead, most int // messages kept, and messages read
	}{{0, 4 * messages}, {40, messages}, {1000, messages}} {
		b, d := &bench{t: t, top: withDisk(4, 1000)}, disk{}
		b.top.log.cfg.ReadAhead = c.ahead * size
		var channels []*Channel
		for _, name := range []string{"a", "b", "c", "d"} {
			ch := b.channel(name)
			channels = append(channels, ch)
			b.consumer(ch, ConsumerID(len(channels)), time.Hour, 0)
		}
		for range messages {
			b.put(nil)
		}
		d.write(b.top, b.now, messages, true, &b.fx)
		read, got := 0, make([]int, len(channels))
		for round := 1; got[len(got)-1] < messages; round++ {
			for i, ch := range channels {
				testkit.Must(t, b.top.SetReady(b.now, ch, ConsumerID(i+1), round*(7-i), &b.fx))
				for n := -1; n != read; {
					n = read
					read += d.read(b.top, b.now, &b.fx)
				}
			}
			for _, m := range b.deliveries() {
				if got[m.Consumer-1]++; number(m.Message) != got[m.Consumer-1] {
					t.Fatalf("consumer %d gets %d after %d", m.Consumer, number(m.Message), got[m.Consumer-1]-1)
				}
			}
			b.check()
			if n := b.top.log.read.messages.Len(); n > max(c.ahead, messages) || c.ahead == 0 && n > 4 {
				t.Fatalf("%d are kept, may be %d", n, c.ahead)
			}
		}
		if read > c.most || read < c.most/2 {
			t.Errorf("with %d kept %d were read", c.ahead, read)
		}
		if n := b.top.log.read.messages.Len(); n > 0 {
			t.Errorf("%d are kept for no reader", n)
		}
	}
}
