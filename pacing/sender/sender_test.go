package sender_test

import (
	"math"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/pacing/sender"
	"github.com/srtm-io/srtm/tokenbucket"
)

const second = mono.Time(time.Second)

// paced is an advice of 10 messages a second, 2 at once.
var paced = sender.Advice{Paced: true, Rate: tokenbucket.PerSecond(10), Burst: 2, Interval: time.Second}

func TestBucketKeepsThePace(t *testing.T) {
	var b sender.Bucket
	testkit.MustEqual(t, b.Wait(1000, 0), 0, "without advice: wait")
	b.Advise(paced, second) // the tokens of a second are there: the burst
	now := second
	for i, want := range []time.Duration{0, 0, 100 * time.Millisecond} {
		testkit.MustEqual(t, b.Wait(1, now), want, "message %d: wait", i)
	}
	testkit.MustEqual(t, b.Wait(1, now.Add(100*time.Millisecond)), 0, "after the wait: wait")
	now = 2 * second
	testkit.MustEqual(t, b.Wait(12, now), 0, "a batch above the burst, of a full bucket: wait")
	if p := b.Pace(now); p.Wait != 1100*time.Millisecond || p.Rate != paced.Rate || p.Burst != 2 || !p.Paced {
		t.Fatalf("after it: %+v", p)
	}
	b.Report(1, now)
	if p := b.Pace(now); p.Wait != 1200*time.Millisecond {
		t.Fatalf("after a report: %+v", p)
	}
}

func TestAdviceIsVoidAfterTenIntervals(t *testing.T) {
	var b sender.Bucket
	b.Advise(paced, 0)
	b.Report(1000, 0)
	if w := b.Wait(1, second); w != 9*time.Second {
		t.Errorf("wait %v, want until the advice is void", w)
	}
	if w, p := b.Wait(1, 10*second), b.Pace(10*second); w != 0 || p.Paced {
		t.Errorf("void: wait %v, %+v", w, p)
	}
}

func TestNewAdviceCounts(t *testing.T) {
	var b sender.Bucket
	b.Advise(paced, 0)
	b.Report(2, 0)
	faster := paced
	faster.Rate *= 10
	b.Advise(faster, 0)
	testkit.Equal(t, b.Wait(1, 0), 10*time.Millisecond, "ten times the rate: wait")
	b.Advise(sender.Advice{Interval: time.Second}, 0)
	testkit.Equal(t, b.Wait(1, 0), 0, "no longer paced: wait")
	b.Advise(sender.Advice{Paced: true, Rate: 0, Burst: -1, Interval: math.MaxInt64 / 100}, 0)
	if p := b.Pace(0); p.Rate != tokenbucket.MinRate || p.Burst != 1 {
		t.Errorf("nonsense: %+v", p)
	}
}

func TestBucketAllocatesNothing(t *testing.T) {
	var b sender.Bucket
	now := mono.Time(0)
	testkit.Equal(t, testing.AllocsPerRun(1000, func() {
		now = now.Add(time.Millisecond)
		b.Advise(paced, now)
		b.Wait(1, now)
		b.Report(1, now)
		b.Pace(now)
	}), 0, "allocations")
}
