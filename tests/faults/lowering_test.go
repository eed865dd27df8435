package faults

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// begin creates the topic on the brokers, offers twice its contract, and waits until the whole
// contract is in use.
func (c *cluster) begin() (a *administration, stop func() int64) { return c.beginWith(offered) }

// beginWith is begin with an offered rate, in messages per second.
func (c *cluster) beginWith(perSecond int) (a *administration, stop func() int64) {
	c.t.Helper()
	create, cancel := context.WithTimeout(c.t.Context(), local.Patience)
	defer cancel()
	c.create(create)
	var each []int
	for range c.brokers {
		each = append(each, perSecond/len(c.brokers))
	}
	_, stop = c.load(each...)
	testkit.WaitFor(c.t, "brokers have their shares", func() bool { return whole(c.shares(), len(c.brokers)) })
	c.flows(rate / 10)
	return c.administer(), stop
}

// until repeats a request until the answer is as wanted.
func (a *administration) until(what string, wanted func(former map[string]former) bool) {
	t := a.c.t
	t.Helper()
	testkit.WaitFor(t, what, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), local.Patience)
		defer cancel()
		r, err := a.admin.GetTopic(ctx, &srtmv1.GetTopicRequest{Name: topic, OmitPublishers: true}, grpc.WaitForReady(true))
		if err != nil {
			return false
		}
		a.acknowledged(a.promises.last().contract, r.Topic.Lowering)
		return wanted(a.promises.last().former)
	})
}

// left counts the messages released by a broker after a time, and returns when the last message had
// its token.
func (b *broker) left(t *testing.T, after mono.Time) (n int, last mono.Time) {
	t.Helper()
	for _, r := range testkit.ReadTrace(t, b.trace(), topic) {
		if last = max(last, r.Eligible); r.Eligible > after {
			n++
		}
	}
	return n, last
}

// A strict broker that is cut off does not receive an update. The broker stops with its lease, no
// later and with no more messages than the update's answer states.
func TestAStrictBrokerStopsWhenTheUpdateSaysSo(t *testing.T) {
	const session, bound = 2 * time.Second, 50 * time.Millisecond // of shortLeases
	c := newClusterOf(t, false, shortLeases, "loadbalance", rate+100, "available", "strict", "available")
	a, stop := c.begin()
	strict := c.brokers[1]
	strict.proxy.Cut(true)
	cut := clock.Mono()
	testkit.Must(t, a.update(tokenbucket.Share{Rate: lowestRate * 1000, Burst: burst / 2}))
	acknowledged := clock.Mono()
	said := a.promises.last().former
	f, named := said[strict.name] // on a busy machine the others may be disconnected, too, for a moment
	if !named || f.until == mono.Never || f.until > cut.Add(session+bound+unsure) {
		t.Fatalf("%v after the broker was cut off, the update says %+v", acknowledged.Sub(cut), said)
	}
	a.until("no broker may use more than the contract", func(former map[string]former) bool { return len(former) == 0 })
	confirmed := clock.Mono()
	c.flows(lowestRate) // of the other brokers: the strict broker stopped long ago
	n, last := strict.left(t, acknowledged)
	if most := f.share.Burst + int64(f.share.Rate.PerSecond()*f.until.Sub(acknowledged).Seconds()) + 1; int64(n) > most {
		t.Errorf("%d messages had their tokens at %s after the answer, which said %d", n, strict.name, most)
	}
	if last > f.until.Add(unsure) {
		t.Errorf("a message had its token %v after the end of the lease", last.Sub(f.until))
	}
	t.Logf("cut off; the update answered after %v: %v msg/s, burst %d for %v more; %d messages left until %v before that end; no longer lowering %v after it",
		acknowledged.Sub(cut), f.share.Rate.PerSecond(), f.share.Burst, f.until.Sub(acknowledged), n, f.until.Sub(last), confirmed.Sub(f.until))
	strict.proxy.Cut(false)
	testkit.WaitFor(t, "it is back", func() bool { s, err := strict.state(); return err == nil && held(s).RateMilli > 0 })
	c.flows(lowestRate)
	c.verify(stop(), a.promises)
}

// A contract is lowered while the restarted adaptor waits for a broker. The new contract is in force
// on the other brokers when the update returns. Former shares that may still be used keep the name of
// the deleted topic busy, whichever process restarts meanwhile.
func TestRestartsForgetNoFormerContract(t *testing.T) {
	for name, apart := range map[string]bool{"embedded": false, "daemon": true} {
		t.Run(name, func(t *testing.T) {
			c := newClusterOf(t, apart, shortLeases, "loadbalance", rate+100, "available", "available", "available")
			a, stop := c.begin()
			away := c.brokers[0]
			reach, cut := func() { away.proxy.Cut(false) }, func() { away.proxy.Cut(true) }
			if apart { // brokers have one way to the adaptor: the connection dies, and no loaddistributor sees the death
				reach = func() { c.startBroker(away) }
				cut = func() {
					testkit.Must(t, c.control.Kill())
					testkit.Must(t, away.process.Kill())
					c.startControl()
				}
			}
			restart := func() {
				testkit.Must(t, c.control.Kill())
				if apart {
					testkit.Must(t, c.adaptor.Kill())
					c.startAdaptor()
				}
				c.startControl()
				testkit.WaitFor(t, "the other brokers are back", func() bool {
					connected := 0
					for _, m := range c.shares().Members {
						if m.Connected {
							connected++
						}
					}
					return connected == 2
				})
			}
			cut()
			restart()
			lower := tokenbucket.Share{Rate: lowestRate * 1000, Burst: burst / 3}
			testkit.WaitFor(t, "the topic is lowered on the other brokers", func() bool { return a.update(lower) == nil })
			// The update waits for the other brokers, but not for brokers that are disconnected for a moment, as they may be on a
			// busy machine.
			a.until("the contract is in force on the other brokers", func(former map[string]former) bool {
				f, named := former[away.name]
				return len(former) == 1 && named && f.until == mono.Never
			})
			c.flows(int(lower.Rate.PerSecond()))
			restart()
			a.until("the broker is named after a restart", func(former map[string]former) bool { return len(former) == 1 })

			c.publishing.Lock()
			ctx, cancel := context.WithTimeout(t.Context(), local.Patience)
			defer cancel()
			r, err := a.admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: topic}, grpc.WaitForReady(true))
			testkit.Must(t, err)
			a.acknowledged(tokenbucket.Share{}, r.Lowering)
			testkit.Must(t, c.control.Kill())
			if apart {
				testkit.Must(t, c.adaptor.Kill())
				c.startAdaptor()
			}
			c.startControl()
			create := func() error {
				limit, cancel := context.WithTimeout(ctx, 10*time.Second)
				defer cancel()
				return c.createTopic(limit, a.admin, lower)
			}
			var named []string
			testkit.WaitFor(t, "the creation is refused for the broker that is cut off", func() bool {
				for _, d := range status.Convert(create()).Details() {
					if l, is := d.(*srtmv1.Lowering); is {
						for _, b := range l.Brokers {
							named = append(named, b.BrokerId)
						}
					}
				}
				return named != nil
			})
			if len(named) != 1 || named[0] != away.name {
				t.Errorf("the creation waits for %v", named)
			}
			a.promises.during(lower)
			reach()
			testkit.WaitFor(t, "the topic is created", func() bool { return create() == nil })
			a.promises = append(a.promises, promise{at: clock.Mono(), contract: lower, fresh: true})
			c.publishing.Unlock()
			c.flows(2 * int(lower.Rate.PerSecond()))
			c.verify(stop(), a.promises)
		})
	}
}
