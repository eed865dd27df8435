package table

import (
	"iter"
	"time"
)

// Sent is what a key held in an epoch of its partition.
type Sent struct {
	Credit
	Epoch uint32
}

// newer reports whether a is to be believed, and not b.
func newer(a, b *Sent) bool {
	switch {
	case a.Epoch != b.Epoch:
		return a.Epoch > b.Epoch
	case a.At != b.At:
		return a.At > b.At
	}
	return a.Credits < b.Credits
}

// Newer returns what a key held last by two accounts, of which each may be nil.
func Newer(a, b *Credit) *Credit {
	if a == nil || b != nil && newer(&Sent{Credit: *b}, &Sent{Credit: *a}) {
		return b
	}
	return a
}

// Replica is what the keys of another server held, as far as that may not be in the store.
// The zero value is empty. Not safe for concurrent use.
//
// Invariant: of a key that is in both, young has what is newer.
type Replica struct {
	young, old struct {
		keys   map[string]Sent
		latest time.Duration // of their At
	}
}

// Len is the number of what is kept, at most two for a key.
func (r *Replica) Len() int { return len(r.young.keys) + len(r.old.keys) }

// Put keeps what a key held. It reports false, and keeps what it has, if that is newer.
func (r *Replica) Put(s Sent) bool {
	if has, ok := r.Get(s.Key); ok && !newer(&s, &has) {
		return has == s
	}
	if r.young.keys == nil {
		r.young.keys = make(map[string]Sent)
	}
	r.young.keys[s.Key] = s
	r.young.latest = max(r.young.latest, s.At)
	return true
}

// Get returns what a key held last.
func (r *Replica) Get(key string) (s Sent, ok bool) {
	if s, ok = r.young.keys[key]; !ok {
		s, ok = r.old.keys[key]
	}
	return s, ok
}

// Saved says that what keys held up to a time is in the store. That is forgotten, some
// of it with the next time.
func (r *Replica) Saved(at time.Duration) {
	if r.old.latest <= at {
		r.old = r.young
		r.young.keys, r.young.latest = nil, 0
	}
}

// All returns what each key held last, in any order.
func (r *Replica) All() iter.Seq[Sent] {
	return func(yield func(Sent) bool) {
		// order: any, each key by itself
		for _, s := range r.young.keys {
			if !yield(s) {
				return
			}
		}
		// order: any, each key by itself
		for key, s := range r.old.keys {
			if _, also := r.young.keys[key]; !also && !yield(s) {
				return
			}
		}
	}
}
