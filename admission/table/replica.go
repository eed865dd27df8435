package table

import (
	"maps"
	"time"
)

// Sent is what a key held in an epoch of its partition.
type Sent struct {
	Credit
	Epoch uint32
}

// Replica is what the keys of another server held, as far as that may not be in the store.
// Not safe for concurrent use.
type Replica map[string]Sent

// Put keeps what a key held. It reports false, and keeps what it has, if that is newer.
func (r Replica) Put(s Sent) bool {
	has, ok := r[s.Key]
	switch {
	case !ok || s.Epoch > has.Epoch:
	case s.Epoch < has.Epoch || s.At < has.At || s.At == has.At && s.Credits > has.Credits:
		return false
	}
	r[s.Key] = s
	return true
}

// Saved says that what keys held up to a time is in the store. That is forgotten.
func (r Replica) Saved(at time.Duration) {
	maps.DeleteFunc(r, func(_ string, s Sent) bool { return s.At <= at })
}
