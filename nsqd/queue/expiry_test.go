package queue

import (
	"fmt"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func newBench(t *testing.T, capacity int) *bench { return &bench{t: t, top: newTest(capacity)} }

func (b *bench) expiry(e Expiry) {
	b.t.Helper()
	b.top.SetExpiry(b.now, e, &b.fx)
	b.check()
}

// dead returns the dead letters since the last call, as "n:attempts".
func (b *bench) dead(want ...string) (all []Dead) {
	b.t.Helper()
	var got []string
	for _, d := range b.fx.Dead {
		got = append(got, fmt.Sprintf("%d:%d", number(d.Message), d.Attempts))
		all = append(all, d)
	}
	b.fx.Reset()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		b.t.Fatalf("dead letters %v, want %v", got, want)
	}
	return all
}

func (b *bench) counters(c *Channel, want ChannelCounters) {
	b.t.Helper()
	got := c.Counters()
	got.ByDistance = want.ByDistance
	testkit.Equal(b.t, got, want, "counters of the channel")
}

func TestAMessageExpiresInAChannelWithoutConsumers(t *testing.T) {
	b := newBench(t, 10)
	c := b.channel("c")
	b.expiry(Expiry{TTL: time.Second})
	b.put(nil)
	b.at(400 * time.Millisecond)
	b.put(nil)
	testkit.Equal(t, time.Duration(b.top.ChannelDeadline()), time.Second, "deadline")
	b.at(time.Second)
	testkit.Equal(t, c.Depth(), 1, "depth")
	b.consumer(c, 1, time.Minute, 1)
	b.expect("2@1:1")
	b.counters(c, ChannelCounters{Messages: 2, Expired: 1, Delivered: 1})
}

func TestAPausedChannelExpiresItsMessages(t *testing.T) {
	b := newBench(t, 10)
	c := b.channel("c")
	b.expiry(Expiry{TTL: time.Second})
	c.Pause()
	b.put(nil)
	b.at(time.Second)
	testkit.Equal(t, c.Depth(), 0, "depth")
}

func TestAMessageInFlightExpiresWhenItComesBack(t *testing.T) {
	b := newBench(t, 10)
	c := b.channel("c")
	b.expiry(Expiry{TTL: time.Second})
	b.consumer(c, 1, time.Minute, 5)
	b.put(nil)
	b.put(nil)
	b.expect("1@1:1", "2@1:1")
	b.at(2 * time.Second)
	testkit.Must(t, b.top.Finish(b.now, c, 1, message(1, 0).ID, &b.fx))
	testkit.Must(t, b.top.Requeue(b.now, c, 1, message(2, 0).ID, 0, &b.fx))
	b.expect()
	b.counters(c, ChannelCounters{Messages: 2, Finished: 1, Requeued: 1, Expired: 1, Delivered: 2})
}

// Four messages come at once under a contract of 1 msg/s and burst 1. The first has a token at once, the second after a
// second. The TTL of the others ends before their turns, so they leave without tokens, and the fifth message gets the
// token of the third second.
func TestAnExpiredMessageTakesNoToken(t *testing.T) {
	b := newBench(t, 10)
	c := b.channel("c")
	b.top.Limit(OverLimit{})
	b.top.SetShare(b.now, tokenbucket.Share{Rate: tokenbucket.PerSecond(1), Burst: 1}, tokenbucket.Token, &b.fx)
	b.expiry(Expiry{TTL: 1500 * time.Millisecond})
	b.consumer(c, 1, time.Minute, 10)
	for range 4 {
		b.put(nil)
	}
	b.expect("1@1:1")
	b.at(time.Second)
	b.expect("2@1:1")
	testkit.Equal(t, time.Duration(b.top.ReleaseDeadline()), 1500*time.Millisecond, "deadline")
	b.at(1500 * time.Millisecond)
	b.expect()
	testkit.Equal(t, b.top.backlog.Counters(), Counters{Accepted: 4, AcceptedBytes: 4, Released: 2, Expired: 2}, "counters of the topic")
	b.put(nil)
	b.at(2 * time.Second)
	b.expect("5@1:1")
}

func TestAChannelShortensTheTopicsTTLAndDoesNotLengthenIt(t *testing.T) {
	topic := Expiry{TTL: time.Minute, MaxAttempts: 3, DeadLetters: true}
	for _, c := range []struct{ own, want Expiry }{
		{Expiry{}, topic},
		{Expiry{TTL: time.Second}, Expiry{time.Second, 3, true}},
		{Expiry{TTL: time.Hour, MaxAttempts: 9}, Expiry{time.Minute, 9, true}},
	} {
		testkit.Equal(t, c.own.within(topic), c.want, fmt.Sprint(c.own))
	}
	testkit.Equal(t, Expiry{TTL: time.Hour}.within(Expiry{}), Expiry{TTL: time.Hour}, "without a topic's")
}

func TestAMessageIsGivenUpAfterMaxAttempts(t *testing.T) {
	b := newBench(t, 10)
	c := b.channel("c")
	b.expiry(Expiry{MaxAttempts: 2})
	b.consumer(c, 1, time.Second, 1)
	b.put(nil)
	b.put(nil)
	b.expect("1@1:1")
	testkit.Must(t, b.top.Requeue(b.now, c, 1, message(1, 0).ID, 0, &b.fx))
	b.expect("2@1:1")
	testkit.Must(t, b.top.Finish(b.now, c, 1, message(2, 0).ID, &b.fx))
	b.expect("1@1:2")
	b.at(time.Second) // the second delivery times out
	b.dead()
	b.expect()
	b.counters(c, ChannelCounters{Messages: 2, Finished: 1, Requeued: 1, TimedOut: 1, GivenUp: 1, Delivered: 3})
}

// fail delivers the next message to consumer 1 and requeues it.
func (b *bench) fail(c *Channel, n int) {
	b.t.Helper()
	b.expect(fmt.Sprintf("%d@1:1", n))
	testkit.Must(b.t, b.top.Requeue(b.now, c, 1, message(n, 0).ID, 0, &b.fx))
	b.check()
}

func TestADeadLetterStaysUntilItIsStored(t *testing.T) {
	b := newBench(t, 10)
	c := b.channel("c")
	b.expiry(Expiry{MaxAttempts: 1, DeadLetters: true})
	b.consumer(c, 1, time.Minute, 1)
	b.put(nil)
	b.fail(c, 1)
	d := b.dead("1:1")
	testkit.Equal(t, c.Depth(), 1, "depth")
	b.top.Bury(b.now, d[0], false, time.Second, &b.fx)
	b.check()
	b.at(time.Second - 1)
	b.dead()
	b.at(time.Second)
	d = b.dead("1:1")
	b.top.Bury(b.now, d[0], true, 0, &b.fx)
	b.check()
	testkit.Equal(t, len(b.fx.Free), 1, "messages that are free")
	b.counters(c, ChannelCounters{Messages: 1, Requeued: 1, DeadLettered: 1, Delivered: 1})
}

// A late answer of the owner does not finish a message that was delivered again or emptied.
func TestALateAnswerAboutADeadLetterChangesNothing(t *testing.T) {
	b := newBench(t, 10)
	c := b.channel("c")
	b.expiry(Expiry{MaxAttempts: 1, DeadLetters: true})
	b.consumer(c, 1, time.Minute, 1)
	b.put(nil)
	b.fail(c, 1)
	first := b.dead("1:1")
	b.at(buryWithin)
	second := b.dead("1:1")
	b.top.Bury(b.now, first[0], true, 0, &b.fx)
	b.check()
	testkit.Equal(t, c.Depth(), 1, "depth after the late answer")
	b.top.EmptyChannel(b.now, c, &b.fx)
	b.top.Bury(b.now, second[0], true, 0, &b.fx)
	b.check()
	b.counters(c, ChannelCounters{Messages: 1, Requeued: 1, Emptied: 1, Delivered: 1})
}

func TestTheOwnerHasABoundedNumberOfDeadLetters(t *testing.T) {
	b := newBench(t, 1000)
	c := b.channel("c")
	b.consumer(c, 1, time.Minute, 1)
	for n := range maxBurying + 10 {
		b.put(nil)
		b.expect(fmt.Sprintf("%d@1:1", n+1))
		testkit.Must(t, b.top.Requeue(b.now, c, 1, message(n+1, 0).ID, time.Second, &b.fx))
	}
	b.expiry(Expiry{MaxAttempts: 1, DeadLetters: true})
	b.at(time.Second)
	testkit.Equal(t, len(b.fx.Dead), maxBurying, "dead letters")
	for _, d := range b.fx.Dead {
		b.top.Bury(b.now, d, true, 0, &Effects{})
	}
	b.fx.Reset()
	b.at(time.Second + buryPause)
	testkit.Equal(t, len(b.fx.Dead), 10, "dead letters")
}
