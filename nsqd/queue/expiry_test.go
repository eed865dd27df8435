package queue

import (
	"fmt"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

func newBench(t *testing.T, capacity int) *bench { return &bench{t: t, top: newTest(capacity)} }

func (b *bench) expiry(e Expiry) {
	b.t.Helper()
	b.top.SetExpiry(b.now, e, &b.fx)
	b.check()
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
