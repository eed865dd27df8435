package table

import (
	"maps"
	"time"
)

// Sent is the credit of a key, with the epoch of its partition.
type Sent struct {
	Credit
	Epoch uint32
}

// Replica holds another server's credits that may not be in the store yet. Not safe for concurrent use.
type Replica map[string]Sent

// Put stores the credit of a key. If the Replica already has a newer credit of the key, Put changes
// nothing and returns false.
func (r Replica) Put(s Sent) bool {
	old, ok := r[s.Key]
	switch {
	case !ok || s.Epoch > old.Epoch:
	case s.Epoch < old.Epoch || s.At < old.At || s.At == old.At && s.Credits > old.Credits:
		return false
	}
	r[s.Key] = s
	return true
}

// Saved removes the credits up to time at, which are in the store.
func (r Replica) Saved(at time.Duration) {
	maps.DeleteFunc(r, func(_ string, s Sent) bool { return s.At <= at })
}
