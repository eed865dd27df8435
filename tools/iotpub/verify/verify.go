package verify

import (
	"fmt"
	"math/bits"
)

// MaxSeq bounds the numbers of one publisher, since a number comes from a
// message body and sizes memory (one bit each): 64 Mi messages, 8 MiB.
const MaxSeq = 1 << 26

// Set is a set of messages, each named by its publisher and its number there.
// It is not safe for concurrent use.
type Set struct {
	// Invariant: size == number of bits set in all words.
	size    uint64
	sources [][]uint64 // a bit for each number
}

// NewSet returns an empty set for publishers 0 .. sources-1.
func NewSet(sources int) *Set { return &Set{sources: make([][]uint64, sources)} }

// Outcome is what Add found.
type Outcome uint8

const (
	// Added: it was not in the set.
	Added Outcome = iota
	// Present: it was there before.
	Present
	// Foreign: no such publisher, or a number out of bounds; the set is
	// unchanged.
	Foreign
)

// Add adds message seq of a publisher.
func (s *Set) Add(source, seq uint32) Outcome {
	if uint64(source) >= uint64(len(s.sources)) || seq >= MaxSeq {
		return Foreign
	}
	words := s.sources[source]
	word, bit := int(seq/64), uint64(1)<<(seq%64)
	if word >= len(words) {
		words = append(words, make([]uint64, word+1-len(words))...)
		s.sources[source] = words
	}
	if words[word]&bit != 0 {
		return Present
	}
	words[word] |= bit
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

// Len returns how many messages are in the set.
func (s *Set) Len() uint64 { return s.size }

// Merge adds the messages of other, which it does not modify.
//
// Requires: both are for the same number of publishers.
func (s *Set) Merge(other *Set) {
	if len(s.sources) != len(other.sources) {
		panic(fmt.Sprintf("merging sets of %d and %d publishers", len(s.sources), len(other.sources)))
	}
	for i, theirs := range other.sources {
		words := s.sources[i]
		if n := len(theirs) - len(words); n > 0 {
			words = append(words, make([]uint64, n)...)
			s.sources[i] = words
		}
		for j, w := range theirs {
			s.size += uint64(bits.OnesCount64(w &^ words[j]))
			words[j] |= w
		}
	}
}

// Deliveries is what a subscriber saw.
type Deliveries struct {
	// Once holds every message delivered at least once.
	Once *Set
	// Duplicates counts deliveries beyond the first of a message.
	Duplicates uint64
	// Foreign counts messages that are not of this run, or claim a publisher
	// or a number that it cannot have.
	Foreign uint64
}

// NewDeliveries returns an empty account for publishers 0 .. sources-1.
func NewDeliveries(sources int) *Deliveries { return &Deliveries{Once: NewSet(sources)} }

// Deliver counts one delivery and returns what it was.
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

// Result is the account of a run.
type Result struct {
	// Accepted: the broker answered OK.
	Accepted uint64 `json:"accepted"`
	// Delivered counts messages that came at least once, accepted or not.
	Delivered uint64 `json:"delivered"`
	// Lost: accepted and never delivered.
	Lost uint64 `json:"lost"`
	// Duplicated counts deliveries beyond the first of a message.
	Duplicated uint64 `json:"duplicated"`
	// Unaccepted: delivered though no OK was seen, as when a connection dies
	// between the broker's accepting and its answer. Allowed, and counted.
	Unaccepted uint64 `json:"unaccepted"`
	// Foreign: deliveries that are no messages of this run.
	Foreign uint64 `json:"foreign"`
}

// Compare draws up the account. It modifies neither.
//
// Requires: both are for the same number of publishers.
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

// Missing returns up to limit messages that were accepted and not delivered,
// in order of publisher and number, to say which ones a report is about.
func Missing(accepted *Set, d *Deliveries, limit int) []Message {
	var missing []Message
	for source := range accepted.sources {
		for word, w := range accepted.sources[source] {
			for ; w != 0; w &= w - 1 {
				m := Message{uint32(source), uint32(word*64 + bits.TrailingZeros64(w))}
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

// Message names one message.
type Message struct {
	Source uint32 `json:"source"`
	Seq    uint32 `json:"seq"`
}
