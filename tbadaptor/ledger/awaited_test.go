package ledger_test

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Brokers hold shares of an earlier ledger. The shares sum to at most the former total. The brokers
// report to a new ledger one by one while the contract changes. The shares that all brokers may be
// using, with or without reports, stay within the former total and the contracts. Shares that are proven free are
// granted at once, and in the end every broker has its target.
func TestSharesGrowWhileBrokersAreAwaited(t *testing.T) {
	grown := 0
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) tokenbucket.Share {
			return tokenbucket.Share{Rate: tokenbucket.Rate(rapid.Int64Range(6, 60).Draw(t, name)), Burst: rapid.Int64Range(6, 20).Draw(t, name)}
		}
		former := draw("former total")
		l := ledger.New(100, ledger.Leases{})
		w := &world{}
		unreported := map[string]tokenbucket.Share{}
		rest := former
		for i := range rapid.IntRange(2, 5).Draw(t, "brokers") {
			n := &node{id: fmt.Sprint("b", i)}
			w.brokers = append(w.brokers, n)
			held := tokenbucket.Share{}
			if rest.Rate > 0 && rest.Burst > 0 && rapid.IntRange(0, 3).Draw(t, "holds nothing") > 0 {
				held = tokenbucket.Share{Rate: tokenbucket.Rate(rapid.Int64Range(1, int64(rest.Rate)).Draw(t, "rate")), Burst: rapid.Int64Range(1, rest.Burst).Draw(t, "burst")}
				rest = rest.Less(held)
			}
			unreported[n.id] = held
		}
		maximum := former // maximum of the former total and the contracts until now
		reported, contract := tokenbucket.Share{}, tokenbucket.Share{}
		check := func() {
			testkit.Must(t, l.CheckForm())
			view, _ := l.Topic("t")
			using := tokenbucket.Share{}
			for _, held := range unreported {
				using.Rate, using.Burst = using.Rate+held.Rate, using.Burst+held.Burst
			}
			reserved := tokenbucket.Share{}
			for _, m := range view.Members {
				reserved.Rate, reserved.Burst = reserved.Rate+m.Reserved.Rate, reserved.Burst+m.Reserved.Burst
			}
			using.Rate, using.Burst = using.Rate+reserved.Rate, using.Burst+reserved.Burst
			if using.Rate > maximum.Rate || using.Burst > maximum.Burst {
				t.Fatalf("brokers may be using %+v of %+v: %+v, unreported %v", using, maximum, view, unreported)
			}
		}
		run := func(grants []ledger.Grant, err error) {
			testkit.Must(t, err)
			check()
			for len(grants) > 0 {
				i := rapid.IntRange(0, len(grants)-1).Draw(t, "arrives")
				g := grants[i]
				grants = slices.Delete(grants, i, i+1)
				more := testkit.Result(l.Ack(g.Broker, g.Topic, g.Epoch, g.Share, 0)).Must(t)
				grants = append(grants, more...)
				check()
			}
			view, _ := l.Topic("t")
			free := contract
			for _, m := range view.Members {
				free = free.Less(m.Reserved)
			}
			if len(unreported) > 0 {
				rest := former.Less(reported)
				free = free.Less(tokenbucket.Share{Rate: max(0, rest.Rate), Burst: max(0, rest.Burst)})
			}
			empty := slices.ContainsFunc(view.Members, func(m ledger.MemberView) bool { return m.Connected && m.Acknowledged.IsZero() && !m.Target.IsZero() })
			for _, m := range view.Members {
				missing := m.Target.Less(m.Acknowledged)
				// A part may be reserved for a broker that has no share yet.
				if m.Connected && !empty && (missing.Rate > 0 && free.Rate > 0 || missing.Burst > 0 && free.Burst > 0) {
					t.Fatalf("%+v is free, and %s has %+v of %+v; unreported: %v", free, m.Broker, m.Acknowledged, m.Target, unreported)
				}
				if len(unreported) > 0 && m.Connected && m.Granted.Rate > 0 && m.Granted == m.Target {
					grown++
				}
			}
		}
		change := func() {
			contract = draw("contract")
			maximum.Rate, maximum.Burst = max(maximum.Rate, contract.Rate), max(maximum.Burst, contract.Burst)
			run(l.Change("t", ledger.Terms{Contract: contract, Former: former}, drawTarget(t, w, contract), w.everyone()))
		}
		change()
		for len(unreported) > 0 {
			if rapid.IntRange(0, 2).Draw(t, "changes") == 0 {
				change()
				continue
			}
			var ids []string
			for _, n := range w.brokers {
				if _, awaited := unreported[n.id]; awaited {
					ids = append(ids, n.id)
				}
			}
			id := rapid.SampledFrom(ids).Draw(t, "hello")
			s := ledger.Session{Broker: id, Stamp: mono.Stamp{Process: id}, Place: identity.Place{Lock: id}}
			if held := unreported[id]; !held.IsZero() {
				s.Shares = []ledger.HeldShare{{Topic: "t", Share: held, Epoch: 7}}
				reported.Rate, reported.Burst = reported.Rate+held.Rate, reported.Burst+held.Burst
			}
			delete(unreported, id)
			run(l.Hello(s, 0))
		}
		if view, found := l.Topic("t"); found && !view.Settled {
			t.Fatalf("all have reported, and not all have their targets: %+v", view)
		}
	})
	if grown == 0 {
		t.Error("no broker ever had its target while others were awaited")
	}
}
