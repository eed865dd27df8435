package table

import (
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Credit is the amount a key held at an instant, for the store or another server.
type Credit struct {
	Key     string             // shares memory with other keys; copy it to keep it long
	Credits tokenbucket.Tokens // thousandths
	At      time.Duration      // wall clock, since the Unix epoch
}

// Now is one instant on both clocks.
type Now struct {
	Mono mono.Time
	Wall time.Duration // since the Unix epoch
}

// Reader identifies a receiver of changed credits. The changes are tracked for each reader separately.
type Reader int

// The readers: Saver is the store, Sender the follower.
const (
	Saver Reader = iota
	Sender
	readers
)

// Changed appends the credits that changed since the reader by last received them. It looks at up
// to n changed slots, starting at slot from. If of is not nil, Changed skips the keys of other
// partitions. It leaves out full keys that are not strict: the reader's older credits have filled
// up by now, too, and a key without credits counts as full.
//
// A pass that begins at 0 and ends with next = 0 covers every key that had changed when the pass began.
func (s *Shard) Changed(reader Reader, to []Credit, selected func(partition int) bool, from, n int32, now Now) (_ []Credit, next int32) {
	changed := s.changed[reader]
	for i := changed.next(from); i >= 0; i = changed.next(i + 1) {
		if n == 0 {
			return to, i
		}
		n--
		e := s.slot(i)
		if selected != nil && !selected(rule.Partition(s.key(e), rule.Partitions)) {
			continue
		}
		changed.remove(i)
		if e.flags&strict != 0 || !e.isFull(now.Mono) {
			to = append(to, s.credit(e, now))
		}
	}
	return to, 0
}

// Unread marks credits as changed again after they could not be saved or sent.
func (s *Shard) Unread(reader Reader, credits []Credit) {
	for _, c := range credits {
		if _, i, ok := find(s, c.Key); !ok {
		} else if reader == Saver { // for all readers: a follower that joined meanwhile (see Restart) has not received them
			s.touch(i)
		} else {
			s.changed[reader].add(i)
		}
	}
}

// Restart makes Sender start over, with the same changes as Saver.
func (s *Shard) Restart() { copy(s.changed[Sender], s.changed[Saver]) }

func (s *Shard) credit(e *slot, now Now) Credit {
	b := e.bucket()
	return Credit{Key: s.key(e), At: now.Wall, Credits: b.Tokens(now.Mono) / tokenbucket.Tokens(e.scale)}
}

// Held returns the credits that a key with credit c has at now under rule r: the stored credits plus
// the credits earned since, at most the capacity. If the wall clock was set back, the key earned
// nothing. A nil c means that the key was never saved: it is full.
func Held(c *Credit, r *rule.Rule, now Now) tokenbucket.Tokens {
	capacity := tokenbucket.Tokens(r.Share.Burst) * tokenbucket.Token
	if c == nil {
		return capacity
	}
	age := max(0, now.Wall-c.At)
	share, scale := r.Bucket()
	b := tokenbucket.New(share, now.Mono)
	b.Retune(now.Mono, share, max(0, c.Credits)*tokenbucket.Tokens(scale))
	return min(capacity, b.Tokens(now.Mono.Add(age))/tokenbucket.Tokens(scale))
}
