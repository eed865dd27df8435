package table

import (
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Credit is what a key held at an instant, for a store or another server.
type Credit struct {
	Key     string             // shares memory with others': who keeps it long has a copy
	Credits tokenbucket.Tokens // thousandths
	At      time.Duration      // wall clock, since the Unix epoch
}

// Now is one instant by both clocks.
type Now struct {
	Mono mono.Time
	Wall time.Duration // since the Unix epoch
}

// Reader is one who is told what changed, each for itself.
type Reader int

// The readers: the store, and a follower.
const (
	Saver Reader = iota
	Sender
	readers
)

// Changed appends what keys hold that changed since the reader was last told of them, from slot from
// on; it looks at up to n of them, and passes over those of other partitions where of is
// not nil. It leaves out those that are full again and that no other decides for: what
// the reader has of one before has filled up, too, or it has nothing and that counts as
// full. What had changed when a pass from 0 began has been returned at its end.
func (s *Shard) Changed(by Reader, to []Credit, of func(partition int) bool, from, n int32, now Now) (_ []Credit, next int32) {
	changed := s.changed[by]
	for i := changed.next(from); i >= 0; i = changed.next(i + 1) {
		if n == 0 {
			return to, i
		}
		n--
		e := s.slot(i)
		if of != nil && !of(rule.Partition(s.key(e), rule.Partitions)) {
			continue
		}
		changed.remove(i)
		if e.flags&strict != 0 || !e.full(now.Mono) {
			to = append(to, s.credit(e, now))
		}
	}
	return to, 0
}

// Unread takes back what Changed returned and could not be saved, or sent.
func (s *Shard) Unread(by Reader, credits []Credit) {
	for _, c := range credits {
		if _, i, ok := find(s, c.Key); !ok {
		} else if by == Saver { // and a follower that came meanwhile, see Restart, was not told
			s.touch(i)
		} else {
			s.changed[by].add(i)
		}
	}
}

// Restart has Sender begin anew, with what Saver would get.
func (s *Shard) Restart() { copy(s.changed[Sender], s.changed[Saver]) }

func (s *Shard) credit(e *slot, now Now) Credit {
	b := e.bucket()
	return Credit{Key: s.key(e), At: now.Wall, Credits: b.Tokens(now.Mono) / tokenbucket.Tokens(e.scale)}
}

// Held is what a key may have at now that held c under a rule: what it held and what
// it earned since, at most the capacity. Where the wall clock was set back it earned
// nothing. A nil c is a key that was never written, so it was not asked for: it is full.
func Held(c *Credit, r *rule.Rule, now Now) tokenbucket.Tokens {
	full := tokenbucket.Tokens(r.Share.Burst) * tokenbucket.Token
	if c == nil {
		return full
	}
	age := max(0, now.Wall-c.At)
	share, scale := r.Bucket()
	b := tokenbucket.New(share, now.Mono)
	b.Retune(now.Mono, share, max(0, c.Credits)*tokenbucket.Tokens(scale))
	return min(full, b.Tokens(now.Mono.Add(age))/tokenbucket.Tokens(scale))
}
