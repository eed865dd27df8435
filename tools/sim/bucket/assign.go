package bucket

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// The rules that assign messages to the buckets of a split.
const (
	// RoundRobin assigns the n-th message to bucket n modulo k.
	RoundRobin = "roundrobin"
	// Random assigns each message to a random bucket, uniformly.
	Random = "random"
	// Keyed spreads each correlation key evenly: the n-th member of the m-th key goes to
	// bucket n+m modulo k, numbered by first appearance. A member is a publisher, whose
	// messages all go to the same bucket, as with a broker. If the file does not name
	// publishers, every message is a member, because a group's burst usually has one
	// message of each publisher. Without keys, all messages are one group. Key m starts
	// at bucket m, so that the first bucket does not get the remainder of every group.
	Keyed = "keyed"
)

// Rules returns the names of the rules, sorted.
func Rules() []string { return []string{Keyed, Random, RoundRobin} }

// assign returns the bucket of each message, 0 to k-1.
func assign(rule string, k int, trace []Arrival, rng *rand.Rand) ([]int, error) {
	to := make([]int, len(trace))
	switch rule {
	case RoundRobin:
		for i := range to {
			to[i] = i % k
		}
	case Random:
		for i := range to {
			to[i] = rng.IntN(k)
		}
	case Keyed:
		keyed(to, k, trace)
	default:
		return nil, fmt.Errorf("unknown assignment %q: there are %s", rule, strings.Join(Rules(), ", "))
	}
	return to, nil
}

func keyed(to []int, k int, trace []Arrival) {
	next := map[string]int{} // bucket of a key's next member
	type member struct{ key, publisher string }
	placed := map[member]int{}
	for i, a := range trace {
		m := member{a.Key, a.Publisher}
		if a.Publisher != "" {
			if bucket, ok := placed[m]; ok {
				to[i] = bucket
				continue
			}
		}
		bucket, ok := next[a.Key]
		if !ok {
			bucket = len(next) % k
		}
		next[a.Key] = (bucket + 1) % k
		to[i] = bucket
		if a.Publisher != "" {
			placed[m] = bucket
		}
	}
}
