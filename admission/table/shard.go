package table

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Shard has the buckets of some keys. Not safe for concurrent use.
//
// Invariants:
//   - index has exactly the slots that are used, by their keys;
//   - dirty has each slot whose bucket changed since Changed returned it, and slots
//     that have been dropped since;
//   - a bucket leaves only when it is full, since then it is what a new one would be,
//     or by Forget, or with its partition. One with a strict rule stays, for a new one
//     might have to begin empty, and one that is lent.
type Shard struct {
	max   int // keys
	index map[string]int32
	pages []*[page]slot
	used  int32 // slots ever used
	free  []int32
	dirty []int32
	// Sends says that Unsent is called; unsent is for that what dirty is for Changed.
	Sends  bool
	unsent []int32
	hand   int32 // where the search for a key to evict goes on
	// Alone says that no other decides for keys that are strict, leased or lent; while it
	// does not, these are denied, and not charged. nil: always.
	Alone func() bool
}

const page = 512

type slot struct {
	key    string
	bucket tokenbucket.Bucket
	change uint64 // of the rule
	denied uint32 // requests, since the key was learned; stops at its maximum
	flags  flags
}

type flags uint16

const (
	inUse flags = 1 << iota
	isDirty
	byDefault
	shadow
	strict
	failOpen
	leased
	lent
	isUnsent
)

// New returns a shard for at most so many keys. Requires: max > 0.
func New(max int) *Shard {
	return &Shard{max: max, index: make(map[string]int32)}
}

// Len is the number of keys.
func (s *Shard) Len() int { return len(s.index) }

func (s *Shard) slot(i int32) *slot { return &s.pages[i/page][i%page] }

// Verdict is what a shard says of a request.
type Verdict struct {
	Known    bool // false: the shard does not have the key, see Learn
	Admit    bool // with Shadow true whatever Denied is
	Denied   bool // the bucket has not got the cost
	Shadow   bool
	Default  bool // the rule is a default, or there is none
	Strict   bool
	FailOpen bool
	Leased   bool
	Lent     bool          // another than the shard decides, see Lend
	Unsure   bool          // denied since another may decide for the key, too
	Left     int64         // credits, rounded down
	Retry    time.Duration // if denied: until the bucket would have the cost; math.MaxInt64 if never
}

// Ask decides a request. With peek it takes nothing.
func (s *Shard) Ask(key []byte, cost int64, now mono.Time, peek bool) Verdict {
	i, ok := s.index[string(key)]
	if !ok {
		return Verdict{}
	}
	e := s.slot(i)
	b := e.bucket // a copy, so that to peek is to ask
	admit, retry := b.Admit(cost, now)
	v := Verdict{
		Known: true, Admit: admit || e.flags&shadow != 0, Denied: !admit,
		Shadow: e.flags&shadow != 0, Default: e.flags&byDefault != 0,
		Strict: e.flags&strict != 0, FailOpen: e.flags&failOpen != 0, Leased: e.flags&leased != 0, Lent: e.flags&lent != 0,
		Left: int64(max(0, b.Tokens(now)) / tokenbucket.Token), Retry: retry,
	}
	if e.flags&(strict|leased|lent) != 0 && s.Alone != nil && !s.Alone() {
		admit, v.Unsure = false, true
		v.Admit, v.Denied, v.Retry = v.Shadow, true, time.Second
	}
	switch {
	case peek:
	case admit:
		e.bucket = b
		s.touch(i, e)
	case e.denied < math.MaxUint32:
		e.denied++
	}
	return v
}

func (s *Shard) touch(i int32, e *slot) {
	if e.flags&isDirty == 0 {
		e.flags |= isDirty
		s.dirty = append(s.dirty, i)
	}
	if s.Sends {
		s.mark(i)
	}
}

// Learn adds a key with its rule, which is its own or a default, and the credits
// that it has at now, of which those above the capacity are lost. It changes nothing
// for a key that the shard has. It reports false, and adds nothing, if the shard is
// full of keys of which none can be evicted.
func (s *Shard) Learn(key string, r *rule.Rule, credits tokenbucket.Tokens, now mono.Time) bool {
	if _, ok := s.index[key]; ok {
		return true
	}
	if len(s.index) >= s.max && !s.evict(now) {
		return false
	}
	var i int32
	switch n := len(s.free); {
	case n > 0:
		i, s.free = s.free[n-1], s.free[:n-1]
	default:
		if int(s.used) == page*len(s.pages) {
			s.pages = append(s.pages, new([page]slot))
		}
		i = s.used
		s.used++
	}
	key = strings.Clone(key)
	e := s.slot(i)
	*e = slot{key: key, flags: inUse}
	e.follow(r)
	e.bucket.Retune(now, r.Share, max(0, credits))
	s.index[key] = i
	return true
}

// follow takes over all of a rule but its share.
func (e *slot) follow(r *rule.Rule) {
	e.change = r.Change
	e.flags &= inUse | isDirty | isUnsent | lent
	for _, f := range []struct {
		set bool
		as  flags
	}{{r.Key != e.key || r.Default(), byDefault}, {r.Shadow, shadow}, {r.Strict, strict}, {r.FailOpen, failOpen}, {r.Mode == rule.Lease, leased}} {
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
		if e := s.slot(i); e.flags&(inUse|isDirty|strict|lent) == inUse && e.full(now) {
			s.drop(i)
			return true
		}
	}
	return false
}

func (e *slot) full(now mono.Time) bool {
	return e.bucket.Tokens(now) >= tokenbucket.Tokens(e.bucket.Share().Burst)*tokenbucket.Token
}

func (s *Shard) drop(i int32) {
	e := s.slot(i)
	delete(s.index, e.key)
	*e = slot{}
	s.free = append(s.free, i)
}

// Follow brings a key that the shard has to a new version of its rule; an older one
// changes nothing. What the bucket holds stays, as far as it fits: an edit brings no
// credits. It reports whether the shard has the key.
func (s *Shard) Follow(key string, r *rule.Rule, now mono.Time) bool {
	i, ok := s.index[key]
	if !ok {
		return false
	}
	s.apply(i, r, now)
	return true
}

func (s *Shard) apply(i int32, r *rule.Rule, now mono.Time) {
	e := s.slot(i)
	if r.Change < e.change {
		return
	}
	e.follow(r)
	if e.bucket.Share() != r.Share {
		e.bucket.Retune(now, r.Share, 0)
		s.touch(i, e)
	}
}

// Undefault goes on from slot from with bringing those keys that have no rule of their
// own to the defaults, after these changed, and looks at up to n slots. It returns
// where to go on, and 0 at the end. The caller gives the lock to others in between.
func (s *Shard) Undefault(d *rule.Defaults, change uint64, from, n int32, now mono.Time) (next int32) {
	end := min(s.used, from+n)
	for i := from; i < end; i++ {
		if e := s.slot(i); e.flags&(inUse|byDefault) == inUse|byDefault {
			r := d.For(e.key)
			r.Change = max(change, e.change)
			s.apply(i, &r, now)
		}
	}
	if end == s.used {
		return 0
	}
	return end
}

// Forget removes a key, whatever it holds.
func (s *Shard) Forget(key string) {
	if i, ok := s.index[key]; ok {
		s.drop(i)
	}
}

// Denied is a key and how often it was denied.
type Denied struct {
	Key   string
	Times uint32
}

// MostDenied adds the shard's keys to the n that were denied most, which are in order.
func (s *Shard) MostDenied(most []Denied, n int) []Denied {
	for i := range s.used {
		e := s.slot(i)
		if e.denied == 0 || len(most) == n && e.denied <= most[n-1].Times {
			continue
		}
		at, _ := slices.BinarySearchFunc(most, e.denied, func(d Denied, times uint32) int { return cmp.Compare(times, d.Times) })
		most = slices.Insert(most, at, Denied{e.key, e.denied})
		most = most[:min(n, len(most))]
	}
	return most
}

// RetryMillis is Retry in milliseconds, rounded up; math.MaxUint32 for what does not
// fit or never comes.
func (v *Verdict) RetryMillis() uint32 {
	ms := v.Retry / time.Millisecond
	if v.Retry%time.Millisecond > 0 {
		ms++
	}
	return uint32(min(ms, math.MaxUint32))
}
