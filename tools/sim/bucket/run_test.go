package bucket_test

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
	"github.com/srtm-io/srtm/tools/sim/bucket"
)

func drawTrace(t *rapid.T, disorder bool) []bucket.Arrival {
	var trace []bucket.Arrival
	var now mono.Time
	for range rapid.IntRange(1, 80).Draw(t, "messages") {
		if rapid.Bool().Draw(t, "later") {
			now += mono.Time(rapid.Int64Range(0, 40e6).Draw(t, "gap"))
		}
		a := bucket.Arrival{At: now}
		if disorder && rapid.IntRange(0, 4).Draw(t, "early") == 0 {
			a.At -= mono.Time(rapid.Int64Range(0, 60e6).Draw(t, "by"))
		}
		a.Key = rapid.SampledFrom([]string{"", "a", "b", "c"}).Draw(t, "key")
		if rapid.Bool().Draw(t, "named") {
			a.Publisher = fmt.Sprint("p", rapid.IntRange(0, 6).Draw(t, "publisher"))
		}
		trace = append(trace, a)
	}
	return trace
}

func drawOptions(t *rapid.T) bucket.Options {
	o := bucket.Options{
		Contract: tokenbucket.Share{
			Rate:  tokenbucket.Rate(rapid.Int64Range(10, 300_000).Draw(t, "rate")),
			Burst: rapid.Int64Range(1, 20).Draw(t, "burst"),
		},
		Assign: rapid.SampledFrom(bucket.Rules()).Draw(t, "assign"),
		Seed:   rapid.Uint64().Draw(t, "seed"),
	}
	o.Split = rapid.IntRange(1, int(min(o.Contract.Burst, 6))).Draw(t, "split")
	return o
}

func TestAReportIsWhatItsBucketsSay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		trace, o := drawTrace(t, true), drawOptions(t)
		r := testkit.Result(bucket.Run(trace, o)).Must(t)
		var sum tokenbucket.Share
		earliest, disorder := trace[0].At, 0
		for i, a := range trace {
			if i > 0 && slices.ContainsFunc(trace[:i], func(b bucket.Arrival) bool { return b.At > a.At }) {
				disorder++
			}
			earliest = min(earliest, a.At)
		}
		all := make([]bucket.Delay, 0, len(trace))
		for n, b := range r.Buckets {
			sum.Rate += tokenbucket.Rate(b.RateMilli)
			sum.Burst += b.Burst
			// The slow version replays one bucket at a time.
			var at []mono.Time
			var got []bucket.Delay
			for i, a := range trace {
				if r.BucketOf[i] == n {
					at, got = append(at, a.At), append(got, r.Delays[i])
				}
			}
			single := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.Rate(b.RateMilli), Burst: b.Burst}, earliest)
			var want []bucket.Delay
			for _, d := range tokenbucket.Replay(at, &single) {
				want = append(want, bucket.Delay(d))
			}
			if !slices.Equal(got, want) {
				t.Fatalf("bucket %d delays %v, want %v", n, got, want)
			}
			check(t, fmt.Sprint("bucket ", n), want, b.Messages, b.Delayed, b.Mean, b.Quantiles)
			all = append(all, want...)
		}
		if sum != o.Contract || len(r.Buckets) != o.Split {
			t.Fatalf("%d shares sum to %v, want %v", len(r.Buckets), sum, o.Contract)
		}
		check(t, "all", all, r.Messages, r.Delayed, r.Mean, r.Quantiles)
		if r.OutOfOrder != disorder {
			t.Fatalf("%d out of order, want %d", r.OutOfOrder, disorder)
		}
	})
}

func check(t *rapid.T, name string, delays []bucket.Delay, messages, delayed int, mean float64, q bucket.Quantiles) {
	slices.Sort(delays)
	var want bucket.Quantiles
	wantMean, wantDelayed := 0.0, 0
	for _, d := range delays {
		wantMean += float64(d) / 1e9 / float64(len(delays))
		if d > 0 {
			wantDelayed++
		}
	}
	if n := len(delays); n > 0 {
		// The smallest value that the given share of all values does not exceed, in thousandths.
		at := func(p int) bucket.Delay { return delays[(p*n+999)/1000-1] }
		want = bucket.Quantiles{P50: at(500), P90: at(900), P99: at(990), P999: at(999), Max: delays[n-1]}
	}
	if messages != len(delays) || delayed != wantDelayed || math.Abs(mean-wantMean) > 1e-9*wantMean || q != want {
		t.Fatalf("%s: %d messages, %d delayed, mean %v, %v; want %d, %d, %v, %v", name, messages, delayed, mean, q, len(delays), wantDelayed, wantMean, want)
	}
}

func TestKeyedSplitsEachGroupEvenly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		trace, o := drawTrace(t, true), drawOptions(t)
		o.Assign = bucket.Keyed
		r := testkit.Result(bucket.Run(trace, o)).Must(t)
		type member struct{ key, publisher string }
		at := map[member]int{}
		counts := map[string][]int{}
		for i, a := range trace {
			bucket := r.BucketOf[i]
			if counts[a.Key] == nil {
				counts[a.Key] = make([]int, o.Split)
			}
			if a.Publisher != "" {
				m := member{a.Key, a.Publisher}
				if first, ok := at[m]; ok {
					if first != bucket {
						t.Fatalf("publisher %v is at %d and %d", m, first, bucket)
					}
					continue
				}
				at[m] = bucket
			}
			counts[a.Key][bucket]++
		}
		for key, c := range counts {
			if slices.Max(c)-slices.Min(c) > 1 {
				t.Fatalf("members of key %q are spread %v", key, c)
			}
		}
	})
}

func TestAssignments(t *testing.T) {
	lines := "0,a,p1\n0,a,p2\n0,a,p1\n0,b\n0,b\n0,a\n0\n0\n0\n0,b,p1\n"
	trace, err := bucket.Read("test", strings.NewReader(lines))
	testkit.Must(t, err)
	for rule, want := range map[string][]int{
		bucket.RoundRobin: {0, 1, 2, 0, 1, 2, 0, 1, 2, 0},
		// a starts at 0, b at 1, messages without a key at 2.
		bucket.Keyed: {0, 1, 0, 1, 2, 2, 2, 0, 1, 0},
	} {
		r, err := bucket.Run(trace, bucket.Options{Contract: tokenbucket.Share{Rate: 1000, Burst: 3}, Split: 3, Assign: rule})
		testkit.Must(t, err)
		testkit.EqualSlices(t, r.BucketOf, want, "%s", rule)
	}
}

func TestRandomUsesAllBucketsAlike(t *testing.T) {
	trace := make([]bucket.Arrival, 40_000)
	r, err := bucket.Run(trace, bucket.Options{Contract: tokenbucket.Share{Rate: 1000, Burst: 4}, Split: 4, Assign: bucket.Random, Seed: 5})
	testkit.Must(t, err)
	for i, b := range r.Buckets {
		// Binomial(40000, 1/4) has a standard deviation of 87.
		if math.Abs(float64(b.Messages)-10_000) > 4*87 {
			t.Errorf("bucket %d got %d of %d messages", i, b.Messages, len(trace))
		}
	}
}

func TestRunRefuses(t *testing.T) {
	good := bucket.Options{Contract: tokenbucket.Share{Rate: 1000, Burst: 3}, Split: 1, Assign: bucket.Keyed}
	for want, o := range map[string]bucket.Options{
		"rate and burst are 0":         {Split: 1, Assign: bucket.Keyed},
		"split 0 is outside":           {Contract: good.Contract, Split: 0, Assign: bucket.Keyed},
		"split 100001 is outside":      {Contract: good.Contract, Split: bucket.MaxSplit + 1, Assign: bucket.Keyed},
		"split 4 is more than burst 3": {Contract: good.Contract, Split: 4, Assign: bucket.Keyed},
		`unknown assignment ""`:        {Contract: good.Contract, Split: 1},
	} {
		if r, err := bucket.Run([]bucket.Arrival{{}}, o); err == nil || !strings.Contains(err.Error(), want) || r != nil {
			t.Errorf("%v gave %v, %v; want an error with %q", o, r, err, want)
		}
	}
	// The rate is a message in 1000 s. The second message would have to wait past the end of the clock, or longer than a
	// delay can count.
	o := bucket.Options{Contract: tokenbucket.Share{Rate: 1, Burst: 1}, Split: 1, Assign: bucket.RoundRobin}
	for _, times := range [][2]mono.Time{{math.MaxInt64 - 1e9, math.MaxInt64 - 1e9}, {math.MaxInt64 - 2e12, math.MinInt64}} {
		if _, err := bucket.Run([]bucket.Arrival{{At: times[0]}, {At: times[1]}}, o); err == nil || !strings.Contains(err.Error(), "message 2 ") {
			t.Errorf("messages at %d: %v, want a refusal of the second", times, err)
		}
	}
}

func TestDelayInJSON(t *testing.T) {
	for d, want := range map[bucket.Delay]string{
		0: "0", 1: "0.000000001", 1e9: "1", 1_500_000_000: "1.5", 20: "0.00000002", 123_456_789: "0.123456789", math.MaxInt64: "9223372036.854775807",
	} {
		if got, err := json.Marshal(d); err != nil || string(got) != want {
			t.Errorf("%d ns is %s (%v), want %s", int64(d), got, err, want)
		}
	}
}
