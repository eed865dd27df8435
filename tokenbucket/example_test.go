package tokenbucket_test

import (
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// A contract of 100 messages per second with a burst of 3 meets 6 messages at once. The bucket is full.
func ExampleBucket_Take() {
	bucket := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(100), Burst: 3}, 0)
	for range 6 {
		fmt.Print(time.Duration(bucket.Take(0)), " ")
	}
	// Output: 0s 0s 0s 10ms 20ms 30ms
}

// A caller that cannot wait calls Admit. The answer to a refusal contains when to come back.
func ExampleBucket_Admit() {
	bucket := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(2), Burst: 5}, 0)
	for _, cost := range []int64{4, 3, 1} {
		admitted, retry := bucket.Admit(cost, 0)
		fmt.Println(cost, admitted, retry)
	}
	// Output:
	// 4 true 0s
	// 3 false 1s
	// 1 true 0s
}

// An adaptor moves half of a contract to another broker. The bucket returns the tokens that exceed the
// new burst, and the other broker starts with these tokens.
func ExampleBucket_Retune() {
	half := tokenbucket.Share{Rate: tokenbucket.PerSecond(50), Burst: 5}
	first := tokenbucket.NewFull(tokenbucket.Share{Rate: tokenbucket.PerSecond(100), Burst: 10}, 0)
	second := tokenbucket.New(half, 0)

	returned := first.Retune(0, half, 0)
	second.Retune(0, half, returned)
	fmt.Println(first.Tokens(0)/tokenbucket.Token, second.Tokens(0)/tokenbucket.Token)
	// Output: 5 5
}

// A broker reads a message late, after a younger message. The burst is 1. Hindsight judges the late
// message by its arrival, when the bucket was full; Bucket has forgotten the token of that time.
func ExampleHindsight() {
	share := tokenbucket.Share{Rate: tokenbucket.PerSecond(100), Burst: 1}
	bucket := tokenbucket.NewFull(share, 0)
	var hindsight tokenbucket.Hindsight
	hindsight.Retune(0, share, tokenbucket.Token)

	young, late := mono.Time(40*time.Millisecond), mono.Time(20*time.Millisecond)
	bucket.Take(young)
	hindsight.Take(young, young)
	fmt.Println("bucket:   ", time.Duration(bucket.Eligible(late)))
	fmt.Println("hindsight:", time.Duration(hindsight.Eligible(late)))
	// Output:
	// bucket:    50ms
	// hindsight: 20ms
}

// A sensor sends 5 messages at once, every second. At 10 messages per second no message of this trace
// waits if the burst is 5.
func ExampleProfile() {
	var arrivals []mono.Time
	for second := range 60 {
		for range 5 {
			arrivals = append(arrivals, mono.Time(second)*mono.Time(time.Second))
		}
	}
	burst, err := tokenbucket.Profile(arrivals, tokenbucket.PerSecond(10), 1)
	fmt.Println(burst, err)
	// Output: 5 <nil>
}

// A contract carries 80 messages per second of 100. Over two brokers, each with half of the contract
// and half of the messages, the mean access delay is 18 times as long.
func ExampleExpectedDelayExact() {
	for _, brokers := range []float64{1, 2} {
		seconds := tokenbucket.ExpectedDelayExact(80/brokers, 100/brokers, 10/brokers)
		fmt.Printf("%v: %.1f ms\n", brokers, 1000*seconds)
	}
	// Output:
	// 1: 0.4 ms
	// 2: 7.2 ms
}
