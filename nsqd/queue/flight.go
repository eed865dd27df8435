package queue

import (
	"encoding/binary"
	"math/bits"
)

// flights finds the items that consumers hold by their messages' ids. It is a
// hash table of which the chains run through the items themselves, so that
// steady traffic allocates nothing, which a map does not guarantee. The zero
// value is empty.
//
// Invariant: an item with the id's hash h is in the chain buckets[h], once.
type flights struct {
	buckets []*item // len is 0 or a power of two
	n       int
}

const flightsMin = 16

// bucket relies on ids being the broker's own: clients cannot make them
// collide. Requires: len(buckets) > 0.
func (f *flights) bucket(id *MessageID) **item {
	h := binary.BigEndian.Uint64(id[:8]) + binary.BigEndian.Uint64(id[8:])
	h *= 0x9e3779b97f4a7c15 // Fibonacci hashing: the high bits are the mixed ones
	return &f.buckets[h>>(64-bits.TrailingZeros(uint(len(f.buckets))))]
}

// get returns an item of that id that the consumer holds, or nil. After a Seek there may
// be two, if the message had been carried forward.
func (f *flights) get(id *MessageID, holder ConsumerID) *item {
	if f.n == 0 {
		return nil
	}
	it := *f.bucket(id)
	for it != nil && (it.msg.ID != *id || it.holder.id != holder) {
		it = it.chain
	}
	return it
}

// add puts an item in. Requires: a consumer holds it.
func (f *flights) add(it *item) {
	if f.n >= len(f.buckets) {
		f.resize(max(flightsMin, 2*len(f.buckets)))
	}
	b := f.bucket(&it.msg.ID)
	it.chain, *b = *b, it
	f.n++
}

// remove takes an item out. Requires: it is in.
func (f *flights) remove(it *item) {
	at := f.bucket(&it.msg.ID)
	for *at != it {
		at = &(*at).chain
	}
	*at, it.chain = it.chain, nil
	f.n--
	// Shrink late, as ring does.
	if len(f.buckets) > 64*flightsMin && f.n < len(f.buckets)/8 {
		f.resize(len(f.buckets) / 2)
	}
}

// resize keeps all items in another number of buckets.
func (f *flights) resize(size int) {
	old := f.buckets
	f.buckets = make([]*item, size)
	for _, it := range old {
		for it != nil {
			next := it.chain
			b := f.bucket(&it.msg.ID)
			it.chain, *b = *b, it
			it = next
		}
	}
}

// clear forgets all items, which keep what they have of the chains.
func (f *flights) clear() { *f = flights{} }
