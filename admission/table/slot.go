package table

import (
	"hash/maphash"
	"math/bits"
	"strings"

	"github.com/srtm-io/srtm/tokenbucket"
)

// page is the number of slots allocated together. A growing shard never moves its pages.
const page = 512

// slot is the state of a key. It has no pointers, so that the garbage collector need not scan the slots
// of ten million keys.
type slot struct {
	state  tokenbucket.State
	change uint64 // of the rule
	rate   tokenbucket.Rate
	burst  int32
	denied uint32 // denied requests since the key was learned; stops at its maximum
	key    uint32 // position of the key, see keep; in a free slot the next free slot, plus 1
	flags  flags
	scale  uint16 // bucket tokens per credit, see refill.Bucket; 0 in a free slot
}

type flags uint8

const (
	inUse flags = 1 << iota
	byDefault
	shadow
	strict
)

func (s *Shard) slot(i int32) *slot { return &s.pages[i/page][i%page] }

// scaled converts credits to bucket tokens (or thousandths to thousandths).
func (e *slot) scaled(credits int64) int64 { return credits * int64(e.scale) }

func (e *slot) share() tokenbucket.Share {
	return tokenbucket.Share{Rate: e.rate, Burst: int64(e.burst)}
}

func (e *slot) bucket() tokenbucket.Bucket { return tokenbucket.Restore(e.share(), e.state) }

func (e *slot) setBucket(b *tokenbucket.Bucket) {
	e.state, e.rate, e.burst = b.State(), b.Share().Rate, int32(b.Share().Burst)
}

// newSlot returns a free slot.
func (s *Shard) newSlot() (i int32) {
	if s.free != 0 {
		i = int32(s.free - 1)
		s.free = s.slot(i).key
		return i
	}
	if int(s.used) == page*len(s.pages) {
		s.pages = append(s.pages, new([page]slot))
		for by := range s.changed {
			s.changed[by] = append(s.changed[by], make(set, page/64)...)
		}
	}
	s.used++
	return s.used - 1
}

// The index is a map from a key's hash to its slot. Go maps consist of tables of at most 1,024 entries,
// which are split one at a time, so no request waits for all of them to grow. If another key has the
// same hash, the key takes the next free number.

func hash[K string | []byte](s *Shard, key K) uint32 {
	return uint32(maphash.Bytes(s.seed, []byte(key))) & s.hashes
}

// find returns the key's slot, and the number at which the index has the key or would insert it.
func find[K string | []byte](s *Shard, key K) (at uint32, i int32, ok bool) {
	for at = hash(s, key); ; at++ {
		if i, ok = s.index[at]; !ok || s.key(s.slot(i)) == string(key) {
			return at, i, ok
		}
	}
}

// unindex removes the entry at a number. It moves later entries forward if a search would no longer
// find them.
func (s *Shard) unindex(at uint32) {
	for next := at + 1; ; next++ {
		i, ok := s.index[next]
		if !ok {
			break
		}
		if home := hash(s, s.key(s.slot(i))); next-home >= next-at {
			s.index[at] = i
			at = next
		}
	}
	delete(s.index, at)
}

// arena is the size in bytes of a block of keys. Each key is stored as its length less 1 in a byte,
// then its text. Written bytes never change, so a returned key stays valid as long as it is referenced.
// If less than half of an arena is in use, its keys are moved to the arena that is being filled; this
// takes time proportional to the keys in one arena.
const arena = 1 << 14

type keys struct {
	arenas  []string // text written to each arena
	used    []int32  // bytes in use in each arena
	spare   []uint32 // unused arenas
	filling uint32   // arena that keep appends to
	text    strings.Builder
}

// storeKey stores key and returns its position.
func (s *Shard) storeKey(key string) (at uint32) {
	k := &s.keys
	if k.text.Len()+1+len(key) > arena {
		full := k.filling
		if n := len(k.spare); n > 0 {
			k.filling, k.spare = k.spare[n-1], k.spare[:n-1]
		} else {
			k.filling, k.arenas, k.used = uint32(len(k.arenas)), append(k.arenas, ""), append(k.used, 0)
		}
		k.text.Reset()
		k.text.Grow(arena)
		s.compact(full) // moves less than an arena
	}
	at = k.filling*arena + uint32(k.text.Len())
	k.text.WriteByte(byte(len(key) - 1))
	k.text.WriteString(key)
	k.arenas[k.filling] = k.text.String()
	k.used[k.filling] += int32(1 + len(key))
	return at
}

func (s *Shard) key(e *slot) string { return keyAt(s.keys.arenas[e.key/arena], e.key%arena) }

func keyAt(text string, at uint32) string {
	return text[at+1:][:int(text[at])+1]
}

// unkeep releases a key of the given length. Requires: no slot refers to the key.
func (s *Shard) unkeep(at uint32, length int) {
	s.keys.used[at/arena] -= int32(1 + length)
	s.compact(at / arena)
}

// compact moves the keys of an arena if less than half of it is in use.
func (s *Shard) compact(a uint32) {
	k := &s.keys
	if a == k.filling || k.used[a] >= arena/2 {
		return
	}
	text := k.arenas[a]
	for at := uint32(0); at < uint32(len(text)); {
		key := keyAt(text, at)
		if _, i, ok := find(s, key); ok && s.slot(i).key == a*arena+at {
			s.slot(i).key = s.storeKey(key)
		}
		at += 1 + uint32(len(key))
	}
	k.arenas[a], k.used[a], k.spare = "", 0, append(k.spare, a)
}

type set []uint64

func (b set) contains(i int32) bool { return b[i/64]>>(uint32(i)%64)&1 != 0 }
func (b set) add(i int32)           { b[i/64] |= 1 << (uint32(i) % 64) }
func (b set) remove(i int32)        { b[i/64] &^= 1 << (uint32(i) % 64) }

// next returns the first slot in the set from i on, or -1.
func (b set) next(i int32) int32 {
	skip := ^uint64(0) << (uint32(i) % 64)
	for w := int(i / 64); w < len(b); w++ {
		if rest := b[w] & skip; rest != 0 {
			return int32(64*w + bits.TrailingZeros64(rest))
		}
		skip = ^uint64(0)
	}
	return -1
}
