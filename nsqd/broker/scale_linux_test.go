//go:build !race

package broker_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// An operation that holds a topic's lock for long delays the topic's publishers. The time of a look at a topic, and of
// its end, must grow with the sum of channels and subscribers, not with their product. Ten times as many of both may
// take up to sixty times as long, which leaves room for cache effects. With the product the factors were 200 and 345.
func TestALockIsNotHeldForChannelsTimesSubscribers(t *testing.T) {
	for name, do := range map[string]func(t *testing.T, b *broker.Broker, top *broker.Topic){
		"a look":  func(_ *testing.T, _ *broker.Broker, top *broker.Topic) { top.Stats() },
		"its end": func(_ *testing.T, b *broker.Broker, top *broker.Topic) { _ = b.DeleteTopic(top.Name()) },
	} {
		t.Run(name, func(t *testing.T) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			took := func(n int) time.Duration {
				b, top := many(t, n)
				defer b.Close()
				start := used(t)
				do(t, b, top)
				return used(t) - start
			}
			few, lots := time.Hour, time.Hour
			for range 5 { // the minimum is free of other programs' work
				few, lots = min(few, took(400)), min(lots, took(4000))
			}
			t.Logf("400 of both: %v, 4000: %v, %.0f times", few, lots, float64(lots)/float64(few))
			if lots > 60*few {
				t.Errorf("400 channels with a subscriber each: %v, 4000: %v", few, lots)
			}
		})
	}
}

// used returns the processor time of this thread. Other programs on the machine do not count.
func used(t *testing.T) time.Duration {
	t.Helper()
	var at unix.Timespec
	testkit.Must(t, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &at))
	return time.Duration(at.Nano())
}

// A step on one channel does not visit the other channels.
func BenchmarkStepBesideChannels(b *testing.B) {
	for _, n := range []int{1, 100, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			br, top := many(b, n)
			defer br.Close()
			sub := testkit.Result(top.Subscribe("c-0", broker.Subscriber{MsgTimeout: time.Minute}, func() {})).Must(b)
			for b.Loop() {
				testkit.Must(b, sub.Ready(1))
			}
		})
	}
}

// many returns a topic of n channels with a subscriber each.
func many(t testing.TB, n int) (*broker.Broker, *broker.Topic) {
	t.Helper()
	b := testkit.Result(broker.New(broker.Config{Capacity: 10, MaxMsgTimeout: time.Minute, AutoCreate: true})).Must(t)
	top := testkit.Result(b.CreateTopic("t")).Must(t)
	for i := range n {
		testkit.Result(top.Subscribe(fmt.Sprintf("c-%d", i), broker.Subscriber{MsgTimeout: time.Minute}, func() {})).Must(t)
	}
	return b, top
}
