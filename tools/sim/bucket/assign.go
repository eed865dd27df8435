package bucket

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// The rules by which messages are assigned to the buckets of a split.
const (
	// RoundRobin gives the n-th message to bucket n modulo k.
	RoundRobin = "roundrobin"
	// Random gives each message to any bucket with equal chance.
	Random = "random"
	// Keyed spreads each correlation key evenly: the n-th member of the m-th
	// key goes to bucket n+m modulo k, keys and members being numbered as they
	// first appear. A member is a publisher, all of whose messages go the same
	// way, as they would with a broker; where the file does not name it, every
	// message is a member of its own, since a group's burst is usually one
	// message of each. Without keys all are one group. Starting key m at bucket
	// m keeps the first bucket from getting the odd one of every group.
	Keyed = "keyed"
)

// Rules returns the names of the rules, sorted.
func Rules() []string { return []string{Keyed, Random, RoundRobin} }

// assign returns the bucket, of k, of each message.
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
