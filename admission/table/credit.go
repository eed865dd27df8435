package table

import (
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

// Changed appends what up to n keys hold that changed since they were last returned.
func (s *Shard) Changed(to []Credit, n int, now Now) []Credit {
	taken := 0
	for _, i := range s.dirty {
		if n == 0 {
			break
		}
		taken++
		if e := s.slot(i); e.flags&isDirty != 0 {
			e.flags &^= isDirty
			to = append(to, e.credit(now))
			n--
		}
	}
	s.dirty = s.dirty[:copy(s.dirty, s.dirty[taken:])]
	return to
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

// Export is Changed for all keys of some partitions.
func (s *Shard) Export(to []Credit, of func(partition int) bool, now Now) []Credit {
	left := s.dirty[:0]
	for _, i := range s.dirty {
		switch e := s.slot(i); {
		case e.flags&isDirty == 0:
		case of(rule.Partition(e.key, rule.Partitions)):
			e.flags &^= isDirty
			to = append(to, e.credit(now))
		default:
			left = append(left, i)
		}
	}
	s.dirty = left
	return to
}

// Drop removes all keys of some partitions: another server has them.
func (s *Shard) Drop(of func(partition int) bool) {
	for i := range s.used {
		if e := s.slot(i); e.flags&inUse != 0 && of(rule.Partition(e.key, rule.Partitions)) {
			s.drop(i)
		}
	}
}
