package adaptor

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestTargetsWithinTheBandAreNotSent(t *testing.T) {
	s := func(rate tokenbucket.Rate, burst int64) tokenbucket.Share {
		return tokenbucket.Share{Rate: rate, Burst: burst}
	}
	view := ledger.TopicView{Members: []ledger.MemberView{
		{Broker: "b1", Target: s(1000, 100)}, {Broker: "b2", Target: s(1000, 100)},
		{Broker: "b3"}, // its target is nothing
	}}
	for _, test := range []struct {
		name   string
		target []share.Assigned
		want   bool
	}{
		{"the same", []share.Assigned{{Broker: "b1", Share: s(1000, 100)}, {Broker: "b2", Share: s(1000, 100)}}, false},
		{"within the band", []share.Assigned{{Broker: "b1", Share: s(1050, 95)}, {Broker: "b2", Share: s(950, 105)}}, false},
		{"a rate outside", []share.Assigned{{Broker: "b1", Share: s(1051, 100)}, {Broker: "b2", Share: s(949, 100)}}, true},
		{"a burst outside", []share.Assigned{{Broker: "b1", Share: s(1000, 106)}, {Broker: "b2", Share: s(1000, 94)}}, true},
		{"a new broker", []share.Assigned{{Broker: "b1", Share: s(1000, 100)}, {Broker: "b2", Share: s(999, 99)}, {Broker: "b4", Share: s(1, 1)}}, true},
		{"a broker left out", []share.Assigned{{Broker: "b1", Share: s(1000, 100)}}, true},
	} {
		testkit.Equal(t, worth(view, test.target), test.want, "%s", test.name)
	}
}

func TestProposeForMembersThatAreAway(t *testing.T) {
	s := func(rate tokenbucket.Rate, burst int64) tokenbucket.Share {
		return tokenbucket.Share{Rate: rate, Burst: burst}
	}
	view := func(reserved tokenbucket.Share) ledger.TopicView {
		return ledger.TopicView{Members: []ledger.MemberView{
			{Broker: "b1", Target: s(500, 5), Reserved: s(500, 5)}, {Broker: "b2", Target: s(500, 5), Reserved: reserved},
		}}
	}
	propose := func(view ledger.TopicView, connected ...string) ([]share.Assigned, error) {
		m := New(0, Config{Window: time.Second})
		c := &Contract{Topic: "t", Rule: share.Proportional, Total: s(1000, 10), Placed: []share.Placed{{Broker: "b1", Publishers: 1}, {Broker: "b2", Publishers: 1}}}
		m.place(0, c)
		for _, broker := range []string{"b1", "b2"} {
			c.tuner.Report(broker, share.Step{At: mono.Time(time.Second), Length: time.Second})
		}
		for _, id := range connected {
			testkit.Result(m.Hello(0, ledger.Session{Broker: id, Stamp: mono.Stamp{Process: "1"}})).Must(t)
		}
		return m.propose(mono.Time(time.Second), c, view)
	}
	for _, test := range []struct {
		name      string
		reserved  tokenbucket.Share
		connected []string
		want      map[string]tokenbucket.Share // nil: no proposal
	}{
		{"one is disconnected and holds its share", s(500, 5), []string{"b1"}, map[string]tokenbucket.Share{"b1": s(500, 5), "b2": s(500, 5)}},
		{"one is disconnected and holds nothing", s(0, 0), []string{"b1"}, map[string]tokenbucket.Share{"b1": s(1000, 10), "b2": {}}},
		{"one is disconnected and holds all", s(1000, 10), []string{"b1"}, nil},
		{"all are disconnected", s(500, 5), []string{}, nil},
	} {
		got, err := propose(view(test.reserved), test.connected...)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		if (got == nil) != (test.want == nil) || len(got) != len(test.want) {
			t.Errorf("%s: %+v, want %+v", test.name, got, test.want)
		}
		for _, a := range got {
			testkit.Equal(t, a.Share, test.want[a.Broker], "%s: %s gets", test.name, a.Broker)
		}
	}
	// A member that restarted, and that the ledger has forgotten, gets a share again.
	forgotten := view(s(0, 0))
	forgotten.Members = forgotten.Members[:1]
	got, err := propose(forgotten, "b1", "b2")
	if err != nil || len(got) != 2 || got[1].Share.IsZero() {
		t.Errorf("a member the ledger does not list: %+v, %v", got, err)
	}
}

// brokers are well connected, and acknowledge grants at once.
type brokers struct {
	t *testing.T
	*Machine
	now mono.Time
}

func connect(t *testing.T, ids ...string) *brokers {
	b := &brokers{t: t, Machine: New(0, Config{Window: 10 * time.Second})}
	for _, id := range ids {
		b.join(id)
	}
	return b
}

func (b *brokers) join(id string) {
	b.t.Helper()
	b.settle(b.Hello(b.now, ledger.Session{Broker: id, Stamp: mono.Stamp{Process: id}}))
}

func (b *brokers) settle(grants []ledger.Grant, err error) {
	b.t.Helper()
	if err == nil {
		err = b.Ledger.Settle(grants, func(ledger.Grant) (tokenbucket.Tokens, bool) { return 0, true })
	}
	testkit.Must(b.t, err)
}

// second advances one second, in which offered messages arrive at each broker, and some messages wait.
func (b *brokers) second(offered map[string]int64) {
	b.t.Helper()
	b.now = b.now.Add(time.Second)
	for id, n := range offered {
		b.Report(id, "t", share.Step{At: b.now, Length: time.Second, Offered: uint64(n), MaxBacklog: n / 10})
	}
	for _, topic := range b.Adaptive(b.now, false) {
		grants, _, err := b.Tune(b.now, topic)
		b.settle(grants, err)
	}
}

// mustHave compares the shares in force, as rate and burst.
func (b *brokers) mustHave(want map[string][2]int64) {
	b.t.Helper()
	view, _ := b.Ledger.Topic("t")
	got := map[string][2]int64{}
	for _, m := range view.Members {
		got[m.Broker] = [2]int64{int64(m.Acknowledged.Rate) / 1000, m.Acknowledged.Burst}
	}
	if !maps.Equal(got, want) {
		b.t.Errorf("at %v: %v, want %v", time.Duration(b.now), got, want)
	}
}

func TestSharesFollowTheLoad(t *testing.T) {
	contract := func(ids ...string) *Contract {
		c := &Contract{Topic: "t", Rule: share.Proportional, Total: tokenbucket.Share{Rate: 90_000, Burst: 9}}
		for _, id := range ids {
			part := tokenbucket.Share{Rate: c.Total.Rate / tokenbucket.Rate(len(ids)), Burst: c.Total.Burst / int64(len(ids))}
			c.Placed = append(c.Placed, share.Placed{Broker: id, Publishers: 10, Quota: part})
		}
		return c
	}
	set := func(b *brokers, ids ...string) {
		t.Helper()
		_, grants, err := b.Set(b.now, contract(ids...))
		b.settle(grants, err)
	}
	// A disconnected broker keeps its share, and the rest is divided.
	b := connect(t, "b1", "b2", "b3")
	set(b, "b1", "b2", "b3")
	b.settle(b.Ledger.Disconnect("b3"), nil)
	for range 12 {
		b.second(map[string]int64{"b1": 50, "b2": 10})
	}
	b.mustHave(map[string][2]int64{"b1": {50, 5}, "b2": {10, 1}, "b3": {30, 3}})
	// A share that has not been granted yet stays: b3 is still connecting.
	c := connect(t, "b1", "b2")
	set(c, "b1", "b2", "b3")
	for range 12 {
		c.second(map[string]int64{"b1": 80, "b2": 10})
	}
	c.mustHave(map[string][2]int64{"b1": {30, 3}, "b2": {30, 3}, "b3": {0, 0}})
	c.join("b3")
	c.second(map[string]int64{"b1": 80, "b2": 10, "b3": 10})
	if view, _ := c.Ledger.Topic("t"); !view.Settled || view.Members[0].Acknowledged.Rate <= 60_000 || view.Members[2].Acknowledged.IsZero() {
		t.Errorf("once it is there: %+v", view)
	}
	// A silent broker has its floor.
	d := connect(t, "b1", "b2")
	set(d, "b1", "b2")
	for range 12 {
		d.second(map[string]int64{"b1": 100, "b2": 0})
	}
	if view, _ := d.Ledger.Topic("t"); view.Members[0].Acknowledged.Rate < 85_000 || view.Members[1].Acknowledged.Rate < 1 || view.Members[1].Acknowledged.Burst < 1 {
		t.Errorf("b2 is silent: %+v", view.Members)
	}
}

// An adaptor that restarts in the middle of a move finds brokers with the former division, or with a
// mixture of both. A division that a rule has tuned stays. The division of a static topic is the last
// ordered division.
func TestWhatARestartFindsInTheMiddleOfAMove(t *testing.T) {
	s := func(rate tokenbucket.Rate, burst int64) tokenbucket.Share {
		return tokenbucket.Share{Rate: rate * 1000, Burst: burst}
	}
	wanted := map[string][2]int64{"b1": {30, 3}, "b2": {60, 6}}
	for _, test := range []struct {
		name, rule string
		b1, b2     tokenbucket.Share // held
		want       map[string][2]int64
	}{
		{"static, before it", share.Static, s(60, 6), s(30, 3), wanted},
		{"static, between decrease and increase", share.Static, s(30, 3), s(30, 3), wanted},
		{"static, after it", share.Static, s(30, 3), s(60, 6), wanted},
		{"tuned", share.Sqrt, s(60, 6), s(30, 3), map[string][2]int64{"b1": {60, 6}, "b2": {30, 3}}},
	} {
		b := connect(t)
		b.settle(b.Restore(b.now, &Contract{Topic: "t", Rule: test.rule, Total: s(90, 9), Placed: []share.Placed{
			{Broker: "b1", Publishers: 30, Quota: s(30, 3)}, {Broker: "b2", Publishers: 60, Quota: s(60, 6)},
		}}))
		for id, holds := range map[string]tokenbucket.Share{"b1": test.b1, "b2": test.b2} {
			b.settle(b.Hello(b.now, ledger.Session{Broker: id, Stamp: mono.Stamp{Process: id}, Shares: []ledger.HeldShare{{Topic: "t", Share: holds, Epoch: 7}}}))
		}
		t.Log(test.name)
		b.mustHave(test.want)
	}
}

func TestTopicsByBrokerFollowTheContracts(t *testing.T) {
	b := connect(t, "b1", "b2", "b3")
	placed := func(retiring string, ids ...string) *Contract {
		c := &Contract{Topic: "t", Rule: share.Sqrt, Total: tokenbucket.Share{Rate: 90_000, Burst: 9}}
		for _, id := range ids {
			part := tokenbucket.Share{Rate: c.Total.Rate / tokenbucket.Rate(len(ids)), Burst: c.Total.Burst / int64(len(ids))}
			c.Placed = append(c.Placed, share.Placed{Broker: id, Publishers: 10, Quota: part, Retiring: id == retiring})
		}
		return c
	}
	expect := func(when string, moving bool, ids ...string) {
		t.Helper()
		var active []string
		for _, id := range []string{"b1", "b2", "b3"} {
			if slices.Contains(b.PlacedOn(id), "t") {
				active = append(active, id)
			}
		}
		if !slices.Equal(active, ids) {
			t.Errorf("%s: placed on %v, want %v", when, active, ids)
		}
		testkit.Equal(t, slices.Contains(b.Adaptive(b.now, true), "t"), moving, "%s: its publishers are followed", when)
	}
	_, grants, err := b.Set(b.now, placed("", "b1", "b2"))
	b.settle(grants, err)
	expect("set", false, "b1", "b2")
	b.settle(b.Update(b.now, placed("b1", "b1", "b2", "b3")))
	expect("b1's publishers move", true, "b1", "b2", "b3")
	b.now = b.now.Add(share.Drain)
	expect("they have moved", false, "b1", "b2", "b3")
	b.settle(b.Update(b.now, placed("b2", "b2", "b3")))
	expect("b2's move", true, "b2", "b3")
	b.settle(b.Remove("t", nil, nil), nil)
	expect("removed", false)
	testkit.Equal(t, len(b.placed)+len(b.moving), 0, "what is left of it")
}

// Most of 100,000 topics are on one broker, which gets the whole contract. Their rules propose nothing
// and cost nothing.
func TestTopicsOnOneBrokerRest(t *testing.T) {
	b := connect(t, "b1", "b2")
	total := tokenbucket.Share{Rate: 90_000, Burst: 9}
	half := tokenbucket.Share{Rate: 45_000, Burst: 4}
	contractOn := func(id string) *Contract {
		return &Contract{Topic: "t", Rule: share.Sqrt, Total: total, Placed: []share.Placed{{Broker: id, Publishers: 10, Quota: total}}}
	}
	expect := func(when string, rests bool) {
		t.Helper()
		testkit.Equal(t, len(b.Adaptive(b.now, false)) == 0, rests, "%s: it rests", when)
	}
	offered := map[string]int64{"b1": 40}
	_, grants, err := b.Set(b.now, contractOn("b1"))
	b.settle(grants, err)
	expect("set", false)
	for range 5 {
		b.second(offered)
	}
	expect("on one broker", true)
	b.mustHave(map[string][2]int64{"b1": {90, 9}})

	b.settle(b.Update(b.now, &Contract{Topic: "t", Rule: share.Sqrt, Total: total, Placed: []share.Placed{
		{Broker: "b1", Publishers: 10, Quota: half, Retiring: true}, {Broker: "b2", Publishers: 10, Quota: tokenbucket.Share{Rate: 45_000, Burst: 5}},
	}}))
	expect("on two", false)
	b.second(offered)
	expect("on two for a second", false)
	b.settle(b.Update(b.now, contractOn("b2")))
	expect("on the other", false)
	b.second(nil)
	expect("on the other for a second", true)
	b.mustHave(map[string][2]int64{"b2": {90, 9}})

	// Another process of the broker has no share, and gets the whole contract.
	b.settle(b.Ledger.Disconnect("b2"), nil)
	b.settle(b.Hello(b.now, ledger.Session{Broker: "b2", Stamp: mono.Stamp{Process: "another"}}))
	b.mustHave(map[string][2]int64{"b2": {90, 9}})

	// After a restart of the adaptor, brokers hold shares from the middle of a move.
	b = connect(t)
	b.settle(b.Restore(b.now, contractOn("b1")))
	for id, holds := range map[string]tokenbucket.Share{"b1": half, "b2": {Rate: 45_000, Burst: 5}} {
		b.settle(b.Hello(b.now, ledger.Session{Broker: id, Stamp: mono.Stamp{Process: id}, Shares: []ledger.HeldShare{{Topic: "t", Share: holds, Epoch: 7}}}))
	}
	expect("restored", false)
	for range 3 {
		b.second(offered)
	}
	b.mustHave(map[string][2]int64{"b1": {90, 9}})
	expect("restored for a while", true)
	b.settle(b.Remove("t", nil, nil), nil)
	testkit.Equal(t, len(b.adaptive), 0, "what is left of it")
}
