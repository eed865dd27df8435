// Package verify decides whether every accepted message was delivered exactly once. The
// package is pure: sets of message numbers in, counts out, no lock, no clock.
// tools/iotpub/fleet owns the set of accepted messages, tools/iotpub/subscriber the set of
// delivered messages. The sets are compared at the end.
package verify

import (
	"fmt"
	"math/bits"
)

// MaxSeq bounds the message numbers of one publisher: 64 Mi messages, 8 MiB. The number
// comes from a message body and determines the memory (one bit per number).
const MaxSeq = 1 << 26

// Set is a set of messages, each identified by publisher and number. A Set is not safe for
// concurrent use.
type Set struct {
	// Invariant: size == number of bits set in all words.
	size    uint64
	sources [][]uint64 // one bit per number
}

// NewSet returns an empty set for publishers 0 .. sources-1.
func NewSet(sources int) *Set { return &Set{sources: make([][]uint64, sources)} }

// Outcome is the result of Add.
type Outcome uint8

const (
	// Added: the message is new.
	Added Outcome = iota
	// Present: the message was already in the set.
	Present
	// Foreign: the publisher or the number is out of bounds; the set is unchanged.
	Foreign
)

// Add adds message seq of a publisher.
func (s *Set) Add(source, seq uint32) Outcome {
	if uint64(source) >= uint64(len(s.sources)) || seq >= MaxSeq {
		return Foreign
	}
	words := s.sources[source]
	index, bit := int(seq/64), uint64(1)<<(seq%64)
	if index >= len(words) {
		words = append(words, make([]uint64, index+1-len(words))...)
		s.sources[source] = words
	}
	if words[index]&bit != 0 {
		return Present
	}
	words[index] |= bit
	s.size++
	return Added
}

// Has reports whether a message is in the set.
func (s *Set) Has(source, seq uint32) bool {
	if uint64(source) >= uint64(len(s.sources)) || int(seq/64) >= len(s.sources[source]) {
		return false
	}
	return s.sources[source][seq/64]&(1<<(seq%64)) != 0
}

// Len returns the number of messages in the set.
func (s *Set) Len() uint64 { return s.size }

// Merge adds the messages of other. Merge does not modify other.
//
// Requires: both sets have the same number of publishers.
func (s *Set) Merge(other *Set) {
	if len(s.sources) != len(other.sources) {
		panic(fmt.Sprintf("merging sets of %d and %d publishers", len(s.sources), len(other.sources)))
	}
	for i, added := range other.sources {
		words := s.sources[i]
		if n := len(added) - len(words); n > 0 {
			words = append(words, make([]uint64, n)...)
			s.sources[i] = words
		}
		for j, w := range added {
			s.size += uint64(bits.OnesCount64(w &^ words[j]))
			words[j] |= w
		}
	}
}

// Deliveries is a subscriber's record of deliveries.
type Deliveries struct {
	// Once holds every message delivered at least once.
	Once *Set
	// Duplicates counts deliveries beyond the first of a message.
	Duplicates uint64
	// Foreign counts messages of other runs, and messages with a publisher or number out of
	// bounds.
	Foreign uint64
}

// NewDeliveries returns an empty record for publishers 0 .. sources-1.
func NewDeliveries(sources int) *Deliveries { return &Deliveries{Once: NewSet(sources)} }

// Deliver records one delivery and returns its outcome.
func (d *Deliveries) Deliver(source, seq uint32) Outcome {
	o := d.Once.Add(source, seq)
	switch o {
	case Present:
		d.Duplicates++
	case Foreign:
		d.Foreign++
	}
	return o
}

// Result is the comparison of accepted and delivered messages.
type Result struct {
	// Accepted: the broker answered OK.
	Accepted uint64 `json:"accepted"`
	// Delivered counts messages delivered at least once, accepted or not.
	Delivered uint64 `json:"delivered"`
	// Lost: accepted and never delivered.
	Lost uint64 `json:"lost"`
	// Duplicated counts deliveries beyond the first of a message.
	Duplicated uint64 `json:"duplicated"`
	// Unaccepted: delivered without an OK. This is no fault: a connection can end after the
	// broker accepts a message and before the reply.
	Unaccepted uint64 `json:"unaccepted"`
	// Foreign: deliveries of other messages than this run's.
	Foreign uint64 `json:"foreign"`
}

// Compare compares deliveries with accepted messages. It modifies neither argument.
//
// Requires: both have the same number of publishers.
func Compare(accepted *Set, d *Deliveries) Result {
	if len(accepted.sources) != len(d.Once.sources) {
		panic(fmt.Sprintf("comparing sets of %d and %d publishers", len(accepted.sources), len(d.Once.sources)))
	}
	r := Result{
		Accepted: accepted.size, Delivered: d.Once.size,
		Duplicated: d.Duplicates, Foreign: d.Foreign,
	}
	var both uint64
	for i, a := range accepted.sources {
		b := d.Once.sources[i]
		for j := range min(len(a), len(b)) {
			both += uint64(bits.OnesCount64(a[j] & b[j]))
		}
	}
	r.Lost = accepted.size - both
	r.Unaccepted = d.Once.size - both
	return r
}

// Missing returns up to limit messages that were accepted and not delivered, ordered by
// publisher and number.
func Missing(accepted *Set, d *Deliveries, limit int) []Message {
	var missing []Message
	for source := range accepted.sources {
		for index, w := range accepted.sources[source] {
			for ; w != 0; w &= w - 1 {
				m := Message{uint32(source), uint32(index*64 + bits.TrailingZeros64(w))}
				if d.Once.Has(m.Source, m.Seq) {
					continue
				}
				if len(missing) == limit {
					return missing
				}
				missing = append(missing, m)
			}
		}
	}
	return missing
}

// Message identifies a message.
type Message struct {
	Source uint32 `json:"source"`
	Seq    uint32 `json:"seq"`
}
