// Package bucket reads recorded arrivals and applies one contract to them, whole or split
// over several buckets. tokenbucket has the buckets and tbadaptor/share divides the
// shares. This package assigns messages to buckets and summarizes the delays. read.go has
// the file format, assign.go the assignment.
package bucket

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tbadaptor/share"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Options select the contract and the split for a trace.
type Options struct {
	Contract tokenbucket.Share
	Split    int    // buckets; 1 is no split
	Assign   string // one of Rules
	Seed     uint64 // of Random
}

// MaxSplit limits the number of buckets.
const MaxSplit = 100_000

// Validate returns every fault at once, joined, or nil.
func (o Options) Validate() error {
	var f faults.List
	if f.If(o.Contract.IsZero(), "rate and burst are 0"); len(f) == 0 {
		f.Add(o.Contract.Validate())
	}
	switch {
	case o.Split < 1 || o.Split > MaxSplit:
		f.If(true, "split %d is outside 1 to %d", o.Split, MaxSplit)
	case o.Contract.Burst > 0 && int64(o.Split) > o.Contract.Burst:
		f.If(true, "split %d is more than burst %d: every bucket needs a token", o.Split, o.Contract.Burst)
	case o.Contract.Rate > 0 && tokenbucket.Rate(o.Split) > o.Contract.Rate:
		f.If(true, "split %d is more than the thousandths of the rate, %s messages per second: every bucket needs one", o.Split, o.Contract.Rate.Text())
	}
	if !slices.Contains(Rules(), o.Assign) {
		_, err := assign(o.Assign, 1, nil, nil)
		f.Add(err)
	}
	return f.Err()
}

// Report is the result of a trace. The JSON form is drlsim's contract.
type Report struct {
	RateMilli  int64     `json:"rate_milli"`
	Burst      int64     `json:"burst"`
	Split      int       `json:"split"`
	Assign     string    `json:"assign"`
	Seed       uint64    `json:"seed"`
	Messages   int       `json:"messages"`
	OutOfOrder int       `json:"out_of_order"` // messages with an earlier time than a message before
	Delayed    int       `json:"delayed"`      // messages that waited for a token
	Mean       float64   `json:"mean_delay_s"`
	Quantiles  Quantiles `json:"quantiles_s"`
	Buckets    []Bucket  `json:"buckets"`
	BucketOf   []int     `json:"bucket_of"`       // per message, in the order of the file
	Delays     []Delay   `json:"access_delays_s"` // per message, in the same order
}

// Quantiles are of access delays, by nearest rank.
type Quantiles struct {
	P50  Delay `json:"p50"`
	P90  Delay `json:"p90"`
	P99  Delay `json:"p99"`
	P999 Delay `json:"p99.9"`
	Max  Delay `json:"max"`
}

// Bucket is one bucket of the split and the result of its messages.
type Bucket struct {
	RateMilli int64     `json:"rate_milli"`
	Burst     int64     `json:"burst"`
	Messages  int       `json:"messages"`
	Delayed   int       `json:"delayed"`
	Mean      float64   `json:"mean_delay_s"`
	Quantiles Quantiles `json:"quantiles_s"`
}

// Delay is an access delay in whole nanoseconds; in JSON, seconds.
type Delay time.Duration

// MarshalJSON writes seconds, as a plain decimal number without rounding.
// Requires: d is not negative.
func (d Delay) MarshalJSON() ([]byte, error) {
	text := strings.TrimRight(fmt.Sprintf("%d.%09d", d/1e9, d%1e9), "0")
	return []byte(strings.TrimSuffix(text, ".")), nil
}

// Run applies o to the trace, message by message in the given order. All buckets are full
// when the earliest message arrives. Run judges messages out of order like a broker, in
// the order of the file. The bucket keeps its guarantee, and a message with an early
// stamp may wait for tokens that later messages took.
//
// The result depends only on the arguments.
func Run(trace []Arrival, o Options) (*Report, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	even := make([]int64, o.Split)
	for i := range even {
		even[i] = 1
	}
	shares, err := share.Proportion(o.Contract, even)
	if err != nil {
		return nil, err
	}
	r := &Report{
		RateMilli: int64(o.Contract.Rate), Burst: o.Contract.Burst,
		Split: o.Split, Assign: o.Assign, Seed: o.Seed, Messages: len(trace),
		Delays: make([]Delay, len(trace)),
	}
	if r.BucketOf, err = assign(o.Assign, o.Split, trace, rand.New(rand.NewPCG(o.Seed, 0))); err != nil {
		return nil, err
	}
	earliest, latest := mono.Never, mono.Time(math.MinInt64)
	for _, a := range trace {
		earliest = min(earliest, a.At)
		if a.At < latest {
			r.OutOfOrder++
		}
		latest = max(latest, a.At)
	}
	buckets := make([]tokenbucket.Bucket, o.Split)
	for i, s := range shares {
		buckets[i] = tokenbucket.NewFull(s, earliest)
	}
	per := make([][]Delay, o.Split)
	for i, a := range trace {
		bucket := r.BucketOf[i]
		e := buckets[bucket].Take(a.At)
		delay := Delay(e.Sub(a.At))
		if e == mono.Never || delay < 0 {
			return nil, fmt.Errorf("message %d would wait for longer than the 292 years that can be counted", i+1)
		}
		r.Delays[i] = delay
		per[bucket] = append(per[bucket], r.Delays[i])
	}
	r.Delayed, r.Mean, r.Quantiles = summarise(slices.Clone(r.Delays))
	for i, s := range shares {
		b := Bucket{RateMilli: int64(s.Rate), Burst: s.Burst, Messages: len(per[i])}
		b.Delayed, b.Mean, b.Quantiles = summarise(per[i])
		r.Buckets = append(r.Buckets, b)
	}
	return r, nil
}

// summarise summarizes delays and sorts them.
func summarise(delays []Delay) (delayed int, mean float64, q Quantiles) {
	if len(delays) == 0 {
		return 0, 0, Quantiles{}
	}
	slices.Sort(delays)
	sum := new(big.Int) // many long waits exceed an int64
	for _, d := range delays {
		if d > 0 {
			delayed++
			sum.Add(sum, big.NewInt(int64(d)))
		}
	}
	mean, _ = new(big.Rat).SetFrac(sum, big.NewInt(int64(len(delays))*1e9)).Float64()
	at := func(p float64) Delay { return delays[tokenbucket.Rank(len(delays), p)] }
	return delayed, mean, Quantiles{P50: at(0.5), P90: at(0.9), P99: at(0.99), P999: at(0.999), Max: at(1)}
}
