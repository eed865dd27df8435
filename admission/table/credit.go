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

// Changed appends what keys hold that changed since it last looked at them, from slot from
// on; it looks at up to n of them, and passes over those of other partitions where of is
// not nil. It leaves out those that are full again and that no other decides for: what
// was saved of one before has filled up, too, or there is nothing saved and it counts as
// full. What had changed when a pass from 0 began has been returned at its end.
func (s *Shard) Changed(to []Credit, of func(partition int) bool, from, n int32, now Now) (_ []Credit, next int32) {
	for i := s.dirty.next(from); i >= 0; i = s.dirty.next(i + 1) {
		if n == 0 {
			return to, i
		}
		n--
		e := s.slot(i)
		if of != nil && !of(rule.Partition(s.key(e), rule.Partitions)) {
			continue
		}
		s.dirty.remove(i)
		if e.flags&(strict|leased|lent) != 0 || !e.full(now.Mono) {
			to = append(to, s.credit(e, now))
		}
	}
	return to, 0
}

// Unsent is Changed for another reader than that one's, if there is one, and with those
// that are full: see Sends.
func (s *Shard) Unsent(to []Credit, from, n int32, now Now) (_ []Credit, next int32) {
	for i := s.unsent.next(from); i >= 0; i = s.unsent.next(i + 1) {
		if n == 0 {
			return to, i
		}
		n--
		s.unsent.remove(i)
		to = append(to, s.credit(s.slot(i), now))
	}
	return to, 0
}

// Resend takes back what Unsent returned and could not be sent.
func (s *Shard) Resend(key string) {
	if _, i, ok := find(s, key); ok {
		s.unsent.add(i)
	}
}

// ResendAll has Unsent begin anew, with what Changed would return.
func (s *Shard) ResendAll() {
	for w := range s.dirty {
		s.unsent[w] |= s.dirty[w]
	}
}

// Unchanged takes back what Changed returned and nobody could take.
func (s *Shard) Unchanged(credits []Credit) {
	for _, c := range credits {
		if _, i, ok := find(s, c.Key); ok {
			s.touch(i)
		}
	}
}

func (s *Shard) credit(e *slot, now Now) Credit {
	b := e.bucket()
	return Credit{Key: s.key(e), Credits: b.Tokens(now.Mono), At: now.Wall}
}

// Held is what a key may have at now that held c under a rule: what it held and what
// it earned since, at most the capacity. Where the wall clock was set back it earned
// nothing. A nil c is a key that was never written, so nobody asked for it: it is full.
func Held(c *Credit, r *rule.Rule, now Now) tokenbucket.Tokens {
	full := tokenbucket.Tokens(r.Share.Burst) * tokenbucket.Token
	if c == nil {
		return full
	}
	age := max(0, now.Wall-c.At)
	b := tokenbucket.New(r.Share, now.Mono)
	b.Retune(now.Mono, r.Share, max(0, c.Credits))
	return min(full, b.Tokens(now.Mono.Add(age)))
}
