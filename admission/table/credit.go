package table

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Credit is what a key held at an instant, for a store or another server.
type Credit struct {
	Key     string
	Credits tokenbucket.Tokens // thousandths
	At      time.Duration      // wall clock, since the Unix epoch
}

// Now is one instant by both clocks.
type Now struct {
	Mono mono.Time
	Wall time.Duration // since the Unix epoch
}

// Dirty is how many keys Changed has to return, or more.
func (s *Shard) Dirty() int { return len(s.dirty) }

// Changed appends what keys hold that changed since it last looked at them, of which it
// looks at up to n. It leaves out those that are full again and that no other decides
// for: what was saved of one before has filled up, too, or there is nothing saved and it
// counts as full.
func (s *Shard) Changed(to []Credit, n int, now Now) []Credit {
	return s.take(&s.dirty, isDirty, nil, to, n, now)
}

// Export is Changed for all keys of some partitions.
func (s *Shard) Export(to []Credit, of func(partition int) bool, now Now) []Credit {
	return s.take(&s.dirty, isDirty, of, to, math.MaxInt, now)
}

// Unsent is Changed for another reader than that one's, if there is one: see Sends.
func (s *Shard) Unsent(to []Credit, n int, now Now) []Credit {
	return s.take(&s.unsent, isUnsent, nil, to, n, now)
}

// take returns what list has, of all partitions if of is nil.
func (s *Shard) take(list *[]int32, flag flags, of func(partition int) bool, to []Credit, n int, now Now) []Credit {
	left := (*list)[:0]
	for at, i := range *list {
		if n == 0 {
			left = append(left, (*list)[at:]...)
			break
		}
		switch e := s.slot(i); {
		case e.flags&flag == 0:
		case of == nil || of(rule.Partition(e.key, rule.Partitions)):
			e.flags &^= flag
			n--
			if flag != isDirty || e.flags&(strict|leased|lent) != 0 || !e.full(now.Mono) {
				to = append(to, e.credit(now))
			}
		default:
			left = append(left, i)
		}
	}
	*list = left
	return to
}

// Resend takes back what Unsent returned and could not be sent.
func (s *Shard) Resend(key string) {
	if i, ok := s.index[key]; ok {
		s.mark(i)
	}
}

// ResendAll has Unsent begin anew, with what Changed would return.
func (s *Shard) ResendAll() {
	for _, i := range s.dirty {
		if s.slot(i).flags&isDirty != 0 {
			s.mark(i)
		}
	}
}

func (s *Shard) mark(i int32) {
	if e := s.slot(i); e.flags&isUnsent == 0 {
		e.flags |= isUnsent
		s.unsent = append(s.unsent, i)
	}
}

// Unchanged takes back what Changed returned and nobody could take.
func (s *Shard) Unchanged(credits []Credit) {
	for _, c := range credits {
		if i, ok := s.index[c.Key]; ok {
			s.touch(i, s.slot(i))
		}
	}
}

func (e *slot) credit(now Now) Credit {
	return Credit{Key: e.key, Credits: e.bucket.Tokens(now.Mono), At: now.Wall}
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

// Drop removes all keys of some partitions: another server has them.
func (s *Shard) Drop(of func(partition int) bool) {
	for i := range s.used {
		if e := s.slot(i); e.flags&inUse != 0 && of(rule.Partition(e.key, rule.Partitions)) {
			s.drop(i)
		}
	}
}
