package faults

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// unsure is the maximum difference between the clocks of two processes on a busy machine.
const unsure = time.Millisecond

// promise is the API's acknowledgement, from a time on: the contract, and beside the contract the
// shares of a former contract that brokers may still use.
type promise struct {
	at       mono.Time
	contract tokenbucket.Share
	former   map[string]former // by broker
	// fresh: a new contract begins with full buckets.
	fresh bool
}

// former is a share that a broker may use until its lease ends; mono.Never: without an end.
type former struct {
	share tokenbucket.Share
	until mono.Time
}

// promises are the promises of a topic, oldest first.
type promises []promise

// fixed is the promise of a contract that never changes.
func fixed() promises {
	return promises{{contract: tokenbucket.Share{Rate: rate * 1000, Burst: burst}}}
}

// last returns the promise in force.
func (p promises) last() promise { return p[len(p)-1] }

// formerOf returns the former shares in an answer of a loaddistributor whose wall clock is at now.
func formerOf(l *srtmv1.Lowering, now time.Time) map[string]former {
	all := map[string]former{}
	for _, b := range l.GetBrokers() {
		f := former{tokenbucket.Share{Rate: tokenbucket.Rate(b.Share.GetRateMilli()), Burst: b.Share.GetBurst()}, mono.Never}
		if b.Until != nil {
			f.until = clock.Mono().Add(b.Until.AsTime().Sub(now))
		}
		all[b.BrokerId] = f
	}
	return all
}

// during adds the limit while a request changes the contract: as much as the old or the new contract
// allows.
func (p *promises) during(contract tokenbucket.Share) {
	now := p.last()
	now.at, now.fresh = clock.Mono(), false
	now.contract = now.contract.Max(contract)
	*p = append(*p, now)
}

// acknowledged adds the promise of an answer.
func (p *promises) acknowledged(contract tokenbucket.Share, l *srtmv1.Lowering, now time.Time) {
	*p = append(*p, promise{at: clock.Mono().Add(unsure), contract: contract, former: formerOf(l, now)})
}

// span is the limit from a time on.
type span struct {
	at    mono.Time
	share tokenbucket.Share
	fresh bool
}

// spans returns the promises as sums. A decrease takes effect late.
func (p promises) spans(late time.Duration) (all []span) {
	for i, one := range p {
		next := mono.Never
		if i+1 < len(p) {
			next = p[i+1].at
		}
		ends := []mono.Time{one.at}
		for _, f := range one.former {
			if f.until > one.at && f.until < next {
				ends = append(ends, f.until)
			}
		}
		slices.Sort(ends)
		for _, at := range slices.Compact(ends) {
			sum := one.contract
			for _, f := range one.former {
				if at < f.until {
					sum.Rate, sum.Burst = sum.Rate+f.share.Rate, sum.Burst+f.share.Burst
				}
			}
			all = append(all, span{at, sum, one.fresh && at == one.at})
		}
	}
	if late == 0 {
		return all
	}
	// The bound at a time is the maximum of all promises since late before that time.
	var times []mono.Time
	fresh := map[mono.Time]bool{}
	for _, one := range all {
		times = append(times, one.at, one.at.Add(late))
		fresh[one.at] = one.fresh
	}
	slices.Sort(times)
	var most []span
	for _, at := range slices.Compact(times) {
		sum := tokenbucket.Share{}
		for i, one := range all {
			if one.at <= at && (i+1 == len(all) || all[i+1].at > at.Add(-late)) {
				sum = sum.Max(one.share)
			}
		}
		most = append(most, span{at, sum, fresh[at]})
	}
	return most
}

// kept checks that no more messages left than was promised: in every interval from s to e at most b(s)
// plus the integral of r from s to e, plus b wherever a new contract began. The check is a single
// bucket with changing rate and burst that never runs dry. If times are the times at which messages
// leave, late is their maximum delay after their tokens.
func (p promises) kept(times []mono.Time, late time.Duration) (slack float64, err error) {
	const token = 1e12 // in subtokens, as in testkit.Envelope
	all := p.spans(late)
	now := all[0]
	full := func() int64 { return (now.share.Burst + int64(now.share.Rate)*late.Milliseconds()/1e6) * token }
	level, lowest := full(), int64(math.MaxInt64)
	from := mono.Time(0)
	pass := func(to mono.Time) {
		if d := to.Sub(from); from > 0 && d > 0 {
			// No bucket here takes longer than a minute to fill, and the product fits.
			level = min(full(), level+int64(now.share.Rate)*int64(min(d, time.Minute)))
		}
		from = max(from, to)
	}
	all = all[1:]
	for i, t := range slices.Sorted(slices.Values(times)) {
		for len(all) > 0 && all[0].at <= t {
			pass(all[0].at)
			now, all = all[0], all[1:]
			if level = min(level, full()); now.fresh {
				level = full()
			}
		}
		pass(t)
		level -= token
		if lowest = min(lowest, level); level < 0 && err == nil {
			err = fmt.Errorf("message %d, %v before the end, is %.3f too many: promised were %v msg/s, burst %d", i, times[len(times)-1].Sub(t), -float64(level)/token,
				now.share.Rate.PerSecond(), now.share.Burst)
		}
	}
	return float64(lowest) / token, err
}

func TestPromisesAreOneBucketThatChanges(t *testing.T) {
	const start = mono.Time(time.Hour)
	at := func(ms int) mono.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	share := func(perSecond tokenbucket.Rate, b int64) tokenbucket.Share {
		return tokenbucket.Share{Rate: perSecond * 1000, Burst: b}
	}
	several := func(n int, ms int) (times []mono.Time) {
		return slices.Repeat([]mono.Time{at(ms)}, n)
	}
	first := promise{at: start, contract: share(10, 5)}
	lowered := promise{at: at(1000), contract: share(1, 1)}
	cut := lowered
	cut.former = map[string]former{"b1": {share(4, 2), at(3000)}, "b2": {share(1, 1), mono.Never}}
	again := promise{at: at(1000), contract: share(10, 5), fresh: true}
	for name, c := range map[string]struct {
		p     promises
		times []mono.Time
		want  bool
	}{
		"a burst":                       {promises{first}, several(5, 0), true},
		"one too many":                  {promises{first}, several(6, 0), false},
		"the burst, earned again":       {promises{first}, slices.Concat(several(5, 0), several(5, 500)), true},
		"before it is lowered":          {promises{first, lowered}, several(5, 999), true},
		"after it is lowered":           {promises{first, lowered}, several(2, 1000), false},
		"the new burst":                 {promises{first, lowered}, several(1, 1000), true},
		"with former shares":            {promises{first, cut}, several(4, 1000), true},
		"more than those":               {promises{first, cut}, several(5, 1000), false},
		"at their rate":                 {promises{first, cut}, slices.Concat(several(4, 1000), several(4, 2000)), true},
		"above their rate":              {promises{first, cut}, slices.Concat(several(4, 1000), several(7, 2000)), false},
		"after the end of one of them":  {promises{first, cut}, several(2, 3000), true},
		"more than what is left then":   {promises{first, cut}, several(3, 3000), false},
		"raised: tokens are earned":     {promises{lowered, {at: at(2000), contract: share(10, 5)}}, slices.Concat(several(1, 2000), several(5, 2500)), true},
		"raised: the burst is not full": {promises{lowered, {at: at(2000), contract: share(10, 5)}}, several(2, 2000), false},
		"created anew":                  {promises{first, again}, slices.Concat(several(5, 999), several(5, 1000)), true},
		"created anew, one too many":    {promises{first, again}, slices.Concat(several(5, 999), several(6, 1000)), false},
	} {
		if _, err := c.p.kept(c.times, 0); (err == nil) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A message that had its token in time leaves up to 100 ms later, at 10 msg/s one message.
	for ms, want := range map[int]int{1000: 6, 1099: 6, 1101: 1} {
		if _, err := (promises{first, lowered}).kept(several(want, ms), 100*time.Millisecond); err != nil {
			t.Errorf("%d messages after %d ms: %v", want, ms, err)
		}
		if _, err := (promises{first, lowered}).kept(several(want+1, ms), 100*time.Millisecond); err == nil {
			t.Errorf("%d messages after %d ms are too many", want+1, ms)
		}
	}
	rng := testkit.Rand(t)
	for range 200 { // for one contract, kept equals testkit.Envelope
		var times []mono.Time
		for now := start; len(times) < 50; now = now.Add(time.Duration(rng.IntN(150)) * time.Millisecond) {
			times = append(times, now)
		}
		slack, err := promises{first}.kept(times, 0)
		want, wrong := testkit.Envelope(times, int64(first.contract.Rate), first.contract.Burst)
		if (err == nil) != (wrong == nil) || math.Abs(slack-want) > 1e-6 && wrong == nil {
			t.Fatalf("%v, slack %v; by the envelope %v, %v", err, slack, wrong, want)
		}
	}
}

// lowerings counts the answers that named brokers, and the named brokers.
type lowerings struct {
	answers int
	brokers map[string]int
}

func (l *lowerings) add(former map[string]former) {
	if len(former) == 0 {
		return
	}
	l.answers++
	if l.brokers == nil {
		l.brokers = map[string]int{}
	}
	for id := range maps.Keys(former) {
		l.brokers[id]++
	}
}
