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

// Shard has the buckets of some keys. Not safe for concurrent use. No call takes time
// that grows with the keys, but for a bit of each that is looked at 64 at a time: what
// concerns many is done in turns, with the slot where to go on, and 0 at the end.
//
// Invariants:
//   - index has exactly the slots that are used, by their keys;
//   - changed has exactly those whose bucket changed since Changed returned it;
//   - a bucket leaves only when it is full, since then it is what a new one would be, or
//     if that has to begin empty has no less, or by Forget, or with its partition.
type Shard struct {
	max     int // keys
	seed    maphash.Seed
	hashes  uint32 // their mask; tests have few, so that keys collide
	index   map[uint32]int32
	keys    keys
	pages   []*[page]slot
	used    int32  // slots ever used
	free    uint32 // the first one, plus 1
	changed [readers]set
	hand    int32 // where the search for a key to evict goes on
	// Alone says that no other server decides for strict keys. While it does not, they are
	// denied, and not charged. nil: always.
	Alone func() bool
}

// New returns a shard for at most so many keys. Requires: max > 0.
func New(max int) *Shard {
	return &Shard{
		max: max, seed: maphash.MakeSeed(), hashes: math.MaxUint32, index: make(map[uint32]int32),
		keys: keys{arenas: make([]string, 1), live: make([]int32, 1)},
	}
}

// Len is the number of keys.
func (s *Shard) Len() int { return len(s.index) }

// Verdict is what a shard says of a request.
type Verdict struct {
	Known   bool // false: the shard does not have the key, see Learn
	Admit   bool // with Shadow true whatever Denied is
	Denied  bool // the bucket has not got the cost
	Shadow  bool
	Default bool          // the rule is a default, or there is none
	Left    int64         // credits after the request, rounded down
	Full    time.Duration // until the bucket is full; math.MaxInt64 if never
	Retry   time.Duration // if denied: until the bucket would have the cost; math.MaxInt64 if never
}

// Ask decides a request. With peek it takes nothing.
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

// Learn adds a key, which is a valid one, with its rule, which is its own or a default, and the credits
// that it has at now, of which those above the capacity are lost. It changes nothing
// for a key that the shard has. It reports false, and adds nothing, if the shard is
// full of keys of which none can be evicted.
func (s *Shard) Learn(key string, r *rule.Rule, credits tokenbucket.Tokens, now mono.Time) bool {
	if _, _, ok := find(s, key); ok {
		return true
	}
	if len(s.index) >= s.max && !s.evict(now) {
		return false
	}
	i := s.newSlot()
	at, _, _ := find(s, key) // after evict, which may have moved it
	share, scale := r.Bucket()
	e := s.slot(i)
	*e = slot{flags: inUse, key: s.keep(key), scale: uint16(scale)}
	var b tokenbucket.Bucket
	b.Retune(now, share, tokenbucket.Tokens(e.scaled(int64(max(0, credits)))))
	e.setBucket(&b)
	e.follow(key, r)
	s.index[at] = i
	return true
}

// follow takes over all of a rule but its share.
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

// evict makes room of one key. It looks at a bounded number of them.
func (s *Shard) evict(now mono.Time) bool {
	for range min(s.used, 4*page) {
		i := s.hand
		s.hand = (s.hand + 1) % s.used
		if e := s.slot(i); e.flags&inUse != 0 && !s.changed[Saver].has(i) && e.full(now) {
			s.drop(i)
			return true
		}
	}
	return false
}

func (e *slot) full(now mono.Time) bool {
	b := e.bucket()
	return b.Tokens(now) >= tokenbucket.Tokens(e.burst)*tokenbucket.Token
}

func (s *Shard) drop(i int32) {
	e := s.slot(i)
	key, kept := s.key(e), e.key
	at, _, _ := find(s, key)
	s.unindex(at)
	*e = slot{key: s.free}
	s.free = uint32(i) + 1
	for _, changed := range s.changed {
		changed.remove(i)
	}
	s.unkeep(kept, len(key))
}

// Follow brings a key that the shard has to a new version of its rule; an older one
// changes nothing. What the bucket holds stays, as far as it fits: an edit brings no
// credits. It reports whether the shard has the key.
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
	if _, wait := b.Admit(0, now); wait != math.MaxInt64 { // of one that only begins later, see Learn
		now = now.Add(wait)
	}
	if int64(e.scale) != scale { // its tokens are other parts of a credit
		held := b.Retune(now, tokenbucket.Share{}, 0) / tokenbucket.Tokens(e.scale)
		e.scale = uint16(scale)
		b.Retune(now, share, tokenbucket.Tokens(e.scaled(int64(held))))
	} else {
		b.Retune(now, share, 0)
	}
	e.setBucket(&b)
	s.touch(i)
}

// Refund gives back what a request took that its asker denied all the same, an age ago. It leaves
// out what the bucket may have earned since: had the request not been, a full bucket would not have
// earned that. So the bucket holds at most what it would hold without the request, unless its rule
// was edited meanwhile to a lower refill.
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
		back := all - earned
		b.Retune(now, b.Share(), tokenbucket.Tokens(back))
		e.setBucket(&b)
		s.touch(i)
	}
}

// turn returns where a turn of n slots that begins at from ends, and where to go on.
func (s *Shard) turn(from, n int32) (end, next int32) {
	if end = min(s.used, from+n); end < s.used {
		next = end
	}
	return end, next
}

// Undefault goes on from slot from with bringing those keys that have no rule of their
// own to the defaults, after these changed, and looks at up to n slots.
func (s *Shard) Undefault(d *rule.Defaults, change uint64, from, n int32, now mono.Time) (next int32) {
	end, next := s.turn(from, n)
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

// Drop removes the keys of some partitions, of up to n slots from from on: another
// server has them.
func (s *Shard) Drop(of func(partition int) bool, from, n int32) (next int32) {
	end, next := s.turn(from, n)
	for i := from; i < end; i++ {
		if e := s.slot(i); e.flags&inUse != 0 && of(rule.Partition(s.key(e), rule.Partitions)) {
			s.drop(i)
		}
	}
	return next
}

// Forget removes a key, whatever it holds.
func (s *Shard) Forget(key string) {
	if _, i, ok := find(s, key); ok {
		s.drop(i)
	}
}

// Denied is a key and how often it was denied.
type Denied struct {
	Key   string
	Times uint32
}

// MostDenied adds the keys of up to n slots from from on to the many that were denied
// most, which are in order.
func (s *Shard) MostDenied(most []Denied, many int, from, n int32) (_ []Denied, next int32) {
	end, next := s.turn(from, n)
	for i := from; i < end; i++ {
		e := s.slot(i)
		if e.denied == 0 || len(most) == many && e.denied <= most[many-1].Times {
			continue
		}
		at, _ := slices.BinarySearchFunc(most, e.denied, func(d Denied, times uint32) int { return cmp.Compare(times, d.Times) })
		most = slices.Insert(most, at, Denied{s.key(e), e.denied})
		most = most[:min(many, len(most))]
	}
	return most, next
}

// Millis returns d in milliseconds, rounded up.
func Millis(d time.Duration) uint64 {
	ms := d / time.Millisecond
	if d%time.Millisecond > 0 {
		ms++
	}
	return uint64(max(0, ms))
}
