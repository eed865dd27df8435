// Package table is the memory of an admission server. shard.go has a bucket for each key, slot.go the
// memory layout of buckets. credit.go exports credits to the store and the follower and imports them.
// window.go keeps the last answers to each asker, so that a question sent again is charged once. The
// package is pure. The holder of the lock around a shard or a window owns it.
//
// Guarantee, for a key with the rule (A, C): in any interval t the admitted requests cost at most C +
// A*t in total, through retries and changes of the rule. shard_test.go, model_test.go and
// window_test.go check the guarantee against slow models. admission/server states what a server may
// admit beyond it after a crash.
package table

import (
	"cmp"
	"hash/maphash"
	"math"
	"math/bits"
	"slices"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Shard holds the buckets of some keys. Not safe for concurrent use. The time of a call does not grow
// with the number of keys, except for a scan of one bit per key, 64 at a time. Methods that visit many
// keys do so in turns: each call returns the slot for the next call, and 0 at the end.
//
// Invariants:
//   - index has exactly the slots in use, by key
//   - changed has exactly the slots whose bucket changed since Changed returned it
//   - a bucket is evicted only when it is full, because a new bucket of its key would hold no more;
//     otherwise it leaves only by Forget or with its partition (Drop)
type Shard struct {
	max        int // keys
	seed       maphash.Seed
	hashes     uint32 // mask of hashes; tests use a small mask, so that keys collide
	index      map[uint32]int32
	keys       keys
	pages      []*[page]slot
	used       int32  // slots ever used
	free       uint32 // first free slot, plus 1
	changed    [readers]set
	evictStart int32 // slot where the next search for a key to evict starts
	// Alone reports that no other server decides for strict keys. If it returns false, strict keys are
	// denied and not charged. nil: always alone.
	Alone func() bool
}

// New returns a shard for at most max keys. Requires: max > 0.
func New(max int) *Shard {
	return &Shard{
		max: max, seed: maphash.MakeSeed(), hashes: math.MaxUint32, index: make(map[uint32]int32),
		keys: keys{arenas: make([]string, 1), used: make([]int32, 1)},
	}
}

// Len returns the number of keys.
func (s *Shard) Len() int { return len(s.index) }

// Verdict is the decision on a request.
type Verdict struct {
	Known   bool // false: the shard does not have the key, see Learn
	Admit   bool // always true if Shadow is
	Denied  bool // the bucket has less than the cost
	Shadow  bool
	Default bool          // the rule is a default, or there is no rule
	Left    int64         // credits after the request, rounded down
	Full    time.Duration // until the bucket is full; math.MaxInt64: never
	Retry   time.Duration // if denied: until the bucket has the cost; math.MaxInt64: never
}

// Ask decides a request. With peek, Ask takes no credits.
func (s *Shard) Ask(key []byte, cost int64, now mono.Time, peek bool) Verdict {
	_, i, ok := find(s, key)
	if !ok {
		return Verdict{}
	}
	e := s.slot(i)
	b := e.bucket()
	admit, retry := b.Admit(e.scaled(cost), now)
	if e.flags&strict != 0 && s.Alone != nil && !s.Alone() {
		admit, b, retry = false, e.bucket(), time.Second
	}
	v := Verdict{
		Known: true, Admit: admit || e.flags&shadow != 0, Denied: !admit,
		Shadow: e.flags&shadow != 0, Default: e.flags&byDefault != 0,
		Left: int64(max(0, b.Tokens(now))/tokenbucket.Token) / int64(e.scale), Full: b.FullAfter(now), Retry: retry,
	}
	switch {
	case peek:
	case admit:
		e.state = b.State()
		s.touch(i)
	case e.denied < math.MaxUint32:
		e.denied++
	}
	return v
}

func (s *Shard) touch(i int32) {
	for _, changed := range s.changed {
		changed.add(i)
	}
}

// Learn adds key with its rule (the key's own or a default) and its credits at time now. Credits above
// the rule's capacity are discarded. If the shard already has the key, Learn changes nothing. If the
// shard is full and no key can be evicted, Learn returns false. Requires: key is valid.
func (s *Shard) Learn(key string, r *rule.Rule, credits tokenbucket.Tokens, now mono.Time) bool {
	if _, _, ok := find(s, key); ok {
		return true
	}
	if len(s.index) >= s.max && !s.evict(now) {
		return false
	}
	i := s.newSlot()
	at, _, _ := find(s, key) // after evict, which may have changed the position
	share, scale := r.Bucket()
	e := s.slot(i)
	*e = slot{flags: inUse, key: s.storeKey(key), scale: uint16(scale)}
	var b tokenbucket.Bucket
	b.Retune(now, share, tokenbucket.Tokens(e.scaled(int64(max(0, credits)))))
	e.setBucket(&b)
	e.follow(key, r)
	s.index[at] = i
	return true
}

// follow copies the rule into the slot, except its share.
func (e *slot) follow(key string, r *rule.Rule) {
	e.change = r.Change
	e.flags &= inUse
	for _, f := range []struct {
		set bool
		as  flags
	}{{r.Key != key || r.Default(), byDefault}, {r.Shadow, shadow}, {r.Strict, strict}} {
		if f.set {
			e.flags |= f.as
		}
	}
}

// evict removes one full key. It looks at a bounded number of keys.
func (s *Shard) evict(now mono.Time) bool {
	for range min(s.used, 4*page) {
		i := s.evictStart
		s.evictStart = (s.evictStart + 1) % s.used
		if e := s.slot(i); e.flags&inUse != 0 && !s.changed[Saver].contains(i) && e.isFull(now) {
			s.drop(i)
			return true
		}
	}
	return false
}

func (e *slot) isFull(now mono.Time) bool {
	b := e.bucket()
	return b.Tokens(now) >= tokenbucket.Tokens(e.burst)*tokenbucket.Token
}

func (s *Shard) drop(i int32) {
	e := s.slot(i)
	key, arena := s.key(e), e.key
	at, _, _ := find(s, key)
	s.unindex(at)
	*e = slot{key: s.free}
	s.free = uint32(i) + 1
	for _, changed := range s.changed {
		changed.remove(i)
	}
	s.unkeep(arena, len(key))
}

// Follow applies a new version of a key's rule; an older version changes nothing. The bucket keeps its
// credits up to the new capacity, because an edit gives no credits. Follow reports whether the shard
// has the key.
func (s *Shard) Follow(key string, r *rule.Rule, now mono.Time) bool {
	_, i, ok := find(s, key)
	if ok {
		s.apply(i, key, r, now)
	}
	return ok
}

func (s *Shard) apply(i int32, key string, r *rule.Rule, now mono.Time) {
	e := s.slot(i)
	if r.Change < e.change {
		return
	}
	e.follow(key, r)
	share, scale := r.Bucket()
	b := e.bucket()
	if b.Share() == share && int64(e.scale) == scale {
		return
	}
	if _, wait := b.Admit(0, now); wait != math.MaxInt64 { // the bucket starts to fill only later, see Learn
		now = now.Add(wait)
	}
	if int64(e.scale) != scale { // a token is a different fraction of a credit now
		credits := b.Retune(now, tokenbucket.Share{}, 0) / tokenbucket.Tokens(e.scale)
		e.scale = uint16(scale)
		b.Retune(now, share, tokenbucket.Tokens(e.scaled(int64(credits))))
	} else {
		b.Retune(now, share, 0)
	}
	e.setBucket(&b)
	s.touch(i)
}

// Refund returns the cost of an admitted request that its asker denied, age after the charge. It
// subtracts the credits that the bucket may have earned since: a full bucket would have earned none
// without the charge. So the bucket never holds more than without the request, unless an edit of the
// rule lowered the refill meanwhile.
func (s *Shard) Refund(key []byte, cost int64, age time.Duration, now mono.Time) {
	_, i, ok := find(s, key)
	if !ok {
		return
	}
	e := s.slot(i)
	b := e.bucket()
	high, low := bits.Mul64(uint64(e.rate), uint64(max(0, age)))
	if high >= uint64(time.Second) {
		return
	}
	earned, rest := bits.Div64(high, low, uint64(time.Second)) // thousandths of tokens
	if rest > 0 {
		earned++
	}
	if all := uint64(e.scaled(cost)) * uint64(tokenbucket.Token); all > earned {
		refunded := all - earned
		b.Retune(now, b.Share(), tokenbucket.Tokens(refunded))
		e.setBucket(&b)
		s.touch(i)
	}
}

// walk returns the end of a turn of n slots from slot from, and the start of the next turn.
func (s *Shard) walk(from, n int32) (end, next int32) {
	if end = min(s.used, from+n); end < s.used {
		next = end
	}
	return end, next
}

// Undefault applies changed defaults to the keys without a rule of their own, in up to n slots from
// slot from.
func (s *Shard) Undefault(d *rule.Defaults, change uint64, from, n int32, now mono.Time) (next int32) {
	end, next := s.walk(from, n)
	for i := from; i < end; i++ {
		if e := s.slot(i); e.flags&(inUse|byDefault) == inUse|byDefault {
			key := s.key(e)
			r := d.For(key)
			r.Change = max(change, e.change)
			s.apply(i, key, &r, now)
		}
	}
	return next
}

// Drop removes the keys of every partition for which of returns true: another server owns the
// partition now. Drop looks at up to n slots, beginning at slot from.
func (s *Shard) Drop(selected func(partition int) bool, from, n int32) (next int32) {
	end, next := s.walk(from, n)
	for i := from; i < end; i++ {
		if e := s.slot(i); e.flags&inUse != 0 && selected(rule.Partition(s.key(e), rule.Partitions)) {
			s.drop(i)
		}
	}
	return next
}

// Forget removes a key, even if it is not full.
func (s *Shard) Forget(key string) {
	if _, i, ok := find(s, key); ok {
		s.drop(i)
	}
}

// Denied is a key and the number of its denied requests.
type Denied struct {
	Key   string
	Times uint32
}

// MostDenied merges the keys of up to n slots from slot from into most, which holds up to many keys,
// most denied first.
func (s *Shard) MostDenied(top []Denied, limit int, from, n int32) (_ []Denied, next int32) {
	end, next := s.walk(from, n)
	for i := from; i < end; i++ {
		e := s.slot(i)
		if e.denied == 0 || len(top) == limit && e.denied <= top[limit-1].Times {
			continue
		}
		at, _ := slices.BinarySearchFunc(top, e.denied, func(d Denied, times uint32) int { return cmp.Compare(times, d.Times) })
		top = slices.Insert(top, at, Denied{s.key(e), e.denied})
		top = top[:min(limit, len(top))]
	}
	return top, next
}

// Near is a key that has less than its capacity, or that was denied a request.
type Near struct {
	Key             string
	Left, Capacity  int64   // credits; Left is rounded down
	Part            float64 // of the capacity, 0 to 1
	Denied          uint32
	Default, Shadow bool
}

// Nearer orders keys by the part of their capacity that is left, then by their denied requests, most
// first.
func Nearer(a, b Near) int {
	return cmp.Or(cmp.Compare(a.Part, b.Part), cmp.Compare(b.Denied, a.Denied))
}

// Nearest merges the keys of up to n slots from slot from into top, which holds up to limit keys in the
// order of Nearer.
func (s *Shard) Nearest(top []Near, limit int, from, n int32, now mono.Time) (_ []Near, next int32) {
	end, next := s.walk(from, n)
	for i := from; i < end; i++ {
		e := s.slot(i)
		if e.flags&inUse == 0 || e.denied == 0 && e.isFull(now) {
			continue
		}
		b := e.bucket()
		tokens := max(0, b.Tokens(now))
		one := Near{
			Left: int64(tokens/tokenbucket.Token) / int64(e.scale), Capacity: int64(e.burst) / int64(e.scale),
			Denied: e.denied, Default: e.flags&byDefault != 0, Shadow: e.flags&shadow != 0,
		}
		if e.burst > 0 {
			one.Part = float64(tokens) / float64(tokenbucket.Token) / float64(e.burst)
		}
		if len(top) == limit && Nearer(one, top[limit-1]) >= 0 {
			continue
		}
		one.Key = s.key(e)
		at, _ := slices.BinarySearchFunc(top, one, Nearer)
		top = slices.Insert(top, at, one)
		top = top[:min(limit, len(top))]
	}
	return top, next
}

// Millis returns d in milliseconds, rounded up.
func Millis(d time.Duration) uint64 {
	ms := d / time.Millisecond
	if d%time.Millisecond > 0 {
		ms++
	}
	return uint64(max(0, ms))
}
