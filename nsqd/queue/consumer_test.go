package queue

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// take hands all deliveries over to their consumers.
func (b *bench) take(c *Channel) {
	for _, d := range b.fx.Deliveries {
		c.MarkSent(d)
	}
}

// waits returns how long each delivery since the last call waited for consumers, in the topic and in its channel.
func (b *bench) waits() string {
	b.t.Helper()
	var got []string
	for _, d := range b.deliveries() {
		got = append(got, fmt.Sprintf("%d: %v+%v", number(d.Message), d.Message.Held, d.Waited))
	}
	return fmt.Sprint(got)
}

func TestAMessageWaitsForConsumersFromWhenItCouldBeHandedOver(t *testing.T) {
	const ms = time.Millisecond
	for name, c := range map[string]struct {
		limited bool
		do      func(b *bench)
		want    string
	}{
		"credit is there": {do: func(b *bench) {
			b.consumer(b.channel("c"), 1, time.Minute, 10)
			b.at(5 * ms)
			b.put(nil)
		}, want: "[1: 0s+0s]"},
		"no channel": {do: func(b *bench) {
			b.put(nil)
			b.at(40 * ms)
			b.consumer(b.channel("c"), 1, time.Minute, 10)
		}, want: "[1: 40ms+0s]"},
		"no channel, limited": {limited: true, do: func(b *bench) {
			b.put(nil)
			b.put(nil)
			b.at(40 * ms)
			b.consumer(b.channel("c"), 1, time.Minute, 10)
			b.at(41 * ms)
			b.put(nil)
		}, want: "[1: 40ms+0s 2: 40ms+0s 3: 0s+0s]"},
		"paused topic": {limited: true, do: func(b *bench) {
			b.consumer(b.channel("c"), 1, time.Minute, 10)
			b.at(10 * ms)
			b.top.Pause()
			b.at(15 * ms)
			b.put(nil)
			b.at(40 * ms)
			b.top.Unpause(b.now, &b.fx)
		}, want: "[1: 25ms+0s]"},
		"no subscriber": {do: func(b *bench) {
			ch := b.channel("c")
			b.put(nil)
			b.at(10 * ms)
			b.put(nil)
			b.at(40 * ms)
			b.consumer(ch, 1, time.Minute, 10)
			b.put(nil)
		}, want: "[1: 0s+40ms 2: 0s+30ms 3: 0s+0s]"},
		"RDY used up": {do: func(b *bench) {
			ch := b.channel("c")
			b.consumer(ch, 1, time.Minute, 1)
			b.put(nil)
			b.put(nil)
			b.put(nil)
			b.take(ch)
			b.at(20 * ms)
			b.finish(ch, 1, 1, nil)
			b.take(ch)
			b.at(30 * ms)
			b.finish(ch, 1, 2, nil)
		}, want: "[1: 0s+0s 2: 0s+20ms 3: 0s+30ms]"},
		"paused channel": {do: func(b *bench) {
			ch := b.channel("c")
			b.consumer(ch, 1, time.Minute, 10)
			ch.Pause()
			b.at(10 * ms)
			b.put(nil)
			b.at(20 * ms)
			b.top.UnpauseChannel(b.now, ch, &b.fx)
		}, want: "[1: 0s+10ms]"},
		"full channel": {do: func(b *bench) {
			ch := b.channel("c")
			b.put(nil)
			b.put(nil)
			b.put(nil) // no room
			b.at(20 * ms)
			b.consumer(ch, 1, time.Minute, 10)
		}, want: "[1: 0s+20ms 2: 0s+20ms 3: 20ms+0s]"},
		"a consumer that does not take it": {do: func(b *bench) {
			ch := b.channel("c")
			b.consumer(ch, 1, 10*ms, 1)
			b.at(5 * ms)
			b.put(nil)
			b.deliveries()
			b.consumer(ch, 2, time.Minute, 1)
			b.at(15 * ms)
		}, want: "[1: 0s+10ms]"},
		"deferred": {do: func(b *bench) {
			ch := b.channel("c")
			b.n++
			m := message(b.n, b.now)
			m.Defer = 30 * ms
			testkit.Must(b.t, b.top.Put(b.now, &b.fx, m))
			b.at(35 * ms)
			b.consumer(ch, 1, time.Minute, 1)
		}, want: "[1: 0s+5ms]"},
		// The broker was late and then releases more messages at once than RDY.
		"a stall of the broker's": {limited: true, do: func(b *bench) {
			ch := b.channel("c")
			b.consumer(ch, 1, time.Minute, 1)
			late := []*Message{message(1, 0), message(2, 0)}
			b.now = b.now.Add(100 * ms)
			testkit.Must(b.t, b.top.Put(b.now, &b.fx, late...))
			b.take(ch)
			b.at(103 * ms)
			b.finish(ch, 1, 1, nil)
		}, want: "[1: 0s+0s 2: 0s+3ms]"},
		"tokens, and no consumer is needed yet": {limited: true, do: func(b *bench) {
			ch := b.channel("c")
			for range 5 {
				b.put(nil)
			}
			b.consumer(ch, 1, time.Minute, 10)
			b.at(100 * ms)
			b.at(200 * ms)
		}, want: "[1: 0s+0s 2: 0s+0s 3: 0s+0s 4: 0s+0s 5: 0s+0s]"},
	} {
		t.Run(name, func(t *testing.T) {
			capacity := 10
			if name == "full channel" {
				capacity = 2
			}
			b := &bench{t: t, top: newTest(capacity)}
			if c.limited {
				b.top.Limit(OverLimit{})
				b.top.SetShare(b.now, tokenbucket.Share{Rate: tokenbucket.PerSecond(10), Burst: 3}, 3000, &b.fx)
			}
			c.do(b)
			testkit.Equal(t, b.waits(), c.want, "waited")
		})
	}
}

// A message from the disk counts as waiting for consumers while there was no credit, and while it was behind a message
// that waited.
func TestWhatComesBackFromDiskWaitedForConsumersWhileTheyLackedCredit(t *testing.T) {
	const ms = time.Millisecond
	for _, through := range []bool{false, true} {
		top := NewTopic(Config{
			Capacity: 1, Overflow: 10, WriteThrough: through,
			MaxInFlight: time.Minute, Rand: rand.New(rand.NewPCG(1, 2)),
		})
		b, d := &bench{t: t, top: top}, disk{}
		ch := b.channel("c")
		for n := range 3 {
			if m := message(n+1, 0); through {
				top.Disk().Appended(b.now, d.append(top.log.End(), m), &b.fx, m)
			} else if err := top.Put(b.now, &b.fx, m); err != nil {
				t.Fatal(err)
			}
		}
		d.write(top, b.now, 10, true, &b.fx)
		b.at(20 * ms) // the first is in memory
		b.consumer(ch, 1, time.Minute, 10)
		b.at(25 * ms)
		for d.read(top, b.now, &b.fx) > 0 {
			b.check()
		}
		testkit.Equal(t, b.waits(), "[1: 0s+20ms 2: 0s+25ms 3: 0s+25ms]", "through %v: waited", through)
	}
}
