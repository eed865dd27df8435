package queue

import (
	"encoding/binary"
	"math/bits"
)

// flights finds the items that consumers hold by the ids of their messages. It is a hash table
// with chains through the items themselves, so steady traffic allocates nothing. A Go map does
// not guarantee that. The zero value is empty.
//
// Invariant: an item with the id's hash h is in the chain buckets[h], once.
type flights struct {
	buckets []*item // len is 0 or a power of two
	n       int
}

const flightsMin = 16

// bucket relies on the broker to assign the ids: clients cannot cause collisions. Requires:
// len(buckets) > 0.
func (f *flights) bucket(id *MessageID) **item {
	h := binary.BigEndian.Uint64(id[:8]) + binary.BigEndian.Uint64(id[8:])
	h *= 0x9e3779b97f4a7c15 // Fibonacci hashing: the high bits are the mixed ones
	return &f.buckets[h>>(64-bits.TrailingZeros(uint(len(f.buckets))))]
}

// get returns an item with the given id and holder, or nil. After a Seek there may be two such
// items if the message was carried forward.
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

// add adds an item. Requires: a consumer holds it.
func (f *flights) add(it *item) {
	if f.n >= len(f.buckets) {
		f.resize(max(flightsMin, 2*len(f.buckets)))
	}
	b := f.bucket(&it.msg.ID)
	it.chain, *b = *b, it
	f.n++
}

// remove removes an item. Requires: the item is in f.
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

// resize moves all items to a new number of buckets.
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

// clear forgets all items. The items keep their chain pointers.
func (f *flights) clear() { *f = flights{} }
