package queue

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func after(d time.Duration) mono.Time { return mono.Time(d) }

func leased(t *testing.T) *bench {
	b := &bench{t: t, top: newTest(100)}
	b.consumer(b.channel("c"), 1, time.Minute, 100)
	b.top.Limit(OverLimit{})
	return b
}

// A second at the flexible share passes, then a tenth of it at the base. The topic looks only after both: each instant
// counts by the share of that instant.
func TestALeaseEndsAtItsEndAndNotWhenSomebodyLooks(t *testing.T) {
	b := leased(t)
	whole := tokenbucket.Share{Rate: tokenbucket.PerSecond(10), Burst: 4}
	base := tokenbucket.Share{Rate: tokenbucket.PerSecond(1), Burst: 2}
	b.top.SetLeased(0, whole, Lease{Base: base, FlexUntil: after(time.Second), Until: mono.Never}, 0, &b.fx)
	b.now = after(3 * time.Second)
	// After a second the topic has four tokens and keeps two. A bucket earns nothing above its burst of two. Without the
	// lapse there would be four.
	for range 6 {
		b.put(nil)
	}
	b.expect("1@1:1", "2@1:1")
	if got, want := b.top.ReleaseDeadline(), after(4*time.Second); got != want {
		t.Errorf("the next token is there at %v, want %v", time.Duration(got), time.Duration(want))
	}
	if s := b.top.contract.Share(); s != base {
		t.Errorf("share %+v after its lease, want the base", s)
	}
	if b.top.Renew(b.now, after(time.Minute), mono.Never, &b.fx) {
		t.Error("a renewal brought back what had lapsed")
	}
	b.at(4 * time.Second)
	b.expect("3@1:1")
}

func TestARenewalInTimeKeepsTheShare(t *testing.T) {
	b := leased(t)
	whole := tokenbucket.Share{Rate: tokenbucket.PerSecond(10), Burst: 4}
	base := tokenbucket.Share{Rate: tokenbucket.PerSecond(1), Burst: 2}
	b.top.SetLeased(0, whole, Lease{Base: base, FlexUntil: after(time.Second), Until: after(5 * time.Second)}, 0, &b.fx)
	if !b.top.Renew(after(999*time.Millisecond), after(2*time.Second), after(6*time.Second), &b.fx) {
		t.Fatal("lapsed before its end")
	}
	b.now = after(1500 * time.Millisecond)
	for range 5 {
		b.put(nil)
	}
	b.expect("1@1:1", "2@1:1", "3@1:1", "4@1:1")
	b.at(1600 * time.Millisecond)
	b.expect("5@1:1")
	// At 2 s only the base is left, and the four tokens are cut to two. At 6 s nothing is left.
	b.now = after(7 * time.Second)
	b.put(nil)
	b.expect()
	if s, d := b.top.contract.Share(), b.top.ReleaseDeadline(); !s.IsZero() || d != mono.Never {
		t.Errorf("share %+v, deadline %v after the session's lease", s, d)
	}
	if b.top.Renew(b.now, after(time.Minute), after(time.Minute), &b.fx) {
		t.Error("a renewal brought back what had lapsed")
	}
	b.at(30 * time.Second)
	b.expect()
	// A grant brings a share back.
	b.top.SetLeased(b.now, base, Forever(base), tokenbucket.Token, &b.fx)
	b.check()
	b.expect("6@1:1")
}

// A grant that arrives after the end of its own lease gives the base only.
func TestAShareWhoseLeaseIsOverIsWorthItsBase(t *testing.T) {
	b := leased(t)
	whole := tokenbucket.Share{Rate: tokenbucket.PerSecond(10), Burst: 4}
	base := tokenbucket.Share{Rate: tokenbucket.PerSecond(1), Burst: 2}
	b.now = after(2 * time.Second)
	b.top.SetLeased(b.now, whole, Lease{Base: base, FlexUntil: after(time.Second), Until: mono.Never}, 4*tokenbucket.Token, &b.fx)
	for range 3 {
		b.put(nil)
	}
	b.expect("1@1:1", "2@1:1")
	if got, want := b.top.ReleaseDeadline(), after(3*time.Second); got != want {
		t.Errorf("the next token is there at %v, want %v", time.Duration(got), time.Duration(want))
	}
}

// A topic on hold releases nothing, asks for no tick, and treats waiting messages as arrived when the hold ends. A topic
// without a contract is not held.
func TestHoldReleasesNothing(t *testing.T) {
	b := leased(t)
	b.top.SetShare(0, tokenbucket.Share{Rate: tokenbucket.PerSecond(10), Burst: 2}, 0, &b.fx)
	b.top.contract.HoldFrom(after(time.Second))
	b.now = after(3 * time.Second)
	b.put(nil)
	b.put(nil)
	b.put(nil)
	b.expect()
	testkit.Equal(t, b.top.ReleaseDeadline(), mono.Never, "deadline on hold")

	b.now = after(4 * time.Second)
	b.top.contract.HoldFrom(after(5 * time.Second))
	b.top.Tick(b.now, &b.fx)
	b.expect("1@1:1", "2@1:1")
	testkit.Equal(t, b.top.ReleaseDeadline(), after(4100*time.Millisecond), "deadline after the hold")

	b.top.contract.HoldFrom(0)
	b.top.Unlimit(b.now, &b.fx)
	b.put(nil)
	b.expect("3@1:1", "4@1:1")
}
