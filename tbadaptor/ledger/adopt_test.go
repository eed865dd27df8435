package ledger

import (
	"errors"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// A contract that shrinks, or moves to another broker, never lets brokers use
// more than the larger of the two contracts.
func TestChange(t *testing.T) {
	l := New(1, Leases{})
	hello := func(id string) []Grant {
		t.Helper()
		g, err := l.Hello(Session{Broker: id, Instance: id + "-1"}, 0)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	ack := func(grants []Grant) (next []Grant) {
		t.Helper()
		for _, g := range grants {
			more, err := l.Ack(g.Broker, g.Topic, g.Epoch, g.Share, 0)
			if err != nil {
				t.Fatal(err)
			}
			next = append(next, more...)
		}
		return next
	}
	part := func(id string, rate, burst int64) share.Assigned {
		return share.Assigned{Broker: id, Share: tokenbucket.Share{Rate: tokenbucket.Rate(rate), Burst: burst}}
	}
	settle := func(grants []Grant, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		for len(grants) > 0 {
			v, _ := l.Topic("t")
			var sum tokenbucket.Share
			for _, m := range v.Members {
				sum.Rate += m.Reserved.Rate
				sum.Burst += m.Reserved.Burst
			}
			if sum.Rate > 1000 || sum.Burst > 10 {
				t.Fatalf("reserved: %+v", sum)
			}
			grants = ack(grants)
		}
		if v, _ := l.Topic("t"); !v.Settled {
			t.Fatalf("not settled: %+v", v)
		}
	}
	hello("a")
	hello("b")
	settle(l.SetContract("t", Terms{Contract: tokenbucket.Share{Rate: 1000, Burst: 10}}, []share.Assigned{part("a", 1000, 10)}))
	settle(l.Change("t", Terms{Contract: tokenbucket.Share{Rate: 600, Burst: 4}}, []share.Assigned{part("a", 400, 2), part("b", 200, 2)}, nil))
	if v, _ := l.Topic("t"); v.Contract != (tokenbucket.Share{Rate: 600, Burst: 4}) || len(v.Members) != 2 {
		t.Errorf("after it shrank: %+v", v)
	}
	settle(l.Change("t", Terms{Contract: tokenbucket.Share{Rate: 1000, Burst: 10}}, []share.Assigned{part("b", 1000, 10)}, nil))
	if v, _ := l.Topic("t"); len(v.Members) != 1 || v.Members[0].Broker != "b" {
		t.Errorf("after it grew and moved: %+v", v)
	}
	if _, err := l.Change("t", Terms{Contract: tokenbucket.Share{Rate: 5, Burst: 1}}, []share.Assigned{part("b", 6, 1)}, nil); err == nil {
		t.Error("shares beyond the contract were taken")
	}
	if _, err := l.Change("t", Terms{Contract: tokenbucket.Share{}}, nil, nil); err == nil {
		t.Error("an empty contract was taken")
	}
	l.Remove("t")
	var busy *Busy
	if _, err := l.Change("t", Terms{Contract: tokenbucket.Share{Rate: 5, Burst: 1}}, []share.Assigned{part("b", 5, 1)}, nil); !errors.As(err, &busy) {
		t.Errorf("while it is being removed: %v", err)
	}
}

// After a restart of the adaptor a topic does not wait for ever for a broker that is
// dead, where the operator chose so.
func TestABrokerThatWasNotHeardIsPresumedDead(t *testing.T) {
	contract := tokenbucket.Share{Rate: 100_000, Burst: 10}
	half := tokenbucket.Share{Rate: 50_000, Burst: 5}
	for _, after := range []time.Duration{0, time.Minute} {
		l := New(100, Leases{Flex: 3 * time.Second, Session: 30 * time.Second, ClockBound: time.Second, PresumeDead: after})
		expire := func(now mono.Time) []Lapse {
			l.Renew("a", now)
			lapses, _ := l.Expire(now)
			return lapses
		}
		start := mono.Time(0).Add(time.Hour)
		if _, err := l.Hello(Session{Broker: "a", Instance: "a1", Policy: Available, Held: []Held{{Topic: "t", Share: half, Epoch: 7}}}, start); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Adopt("t", Terms{Contract: contract}, []share.Assigned{{Broker: "a", Share: half}, {Broker: "b", Share: half}}, nil); err != nil {
			t.Fatal(err)
		}
		if first := expire(start); len(first) > 0 {
			t.Fatalf("at once: %v", first)
		}
		expire(start.Add(30 * time.Second)) // leases
		if lapses := expire(start.Add(61 * time.Second)); len(lapses) > 0 {
			t.Fatalf("after %v: %v", after, lapses)
		}
		lapses := expire(start.Add(62 * time.Second))
		v, _ := l.Topic("t")
		if dead := after > 0; dead != (len(v.Awaited) == 0) || dead != (len(lapses) == 1 && lapses[0].Base && lapses[0].Broker == "b") {
			t.Errorf("presumed dead after %v: awaits %v, ended %v", after, v.Awaited, lapses)
		}
		if again := expire(start.Add(63 * time.Second)); len(again) > 0 {
			t.Errorf("again: %v", again)
		}
	}
}
