package table_test

import (
	"cmp"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// model is a Shard of Go maps and whole buckets: four times as large, but simple.
type model struct {
	max   int
	index map[string]int
	slots []*row // nil: free
	free  []int
	hand  int
	alone func() bool
}

type row struct {
	key     string
	rule    rule.Rule
	bucket  tokenbucket.Bucket
	denied  uint32
	changed [2]bool // by table.Reader
}

func newModel(max int) *model { return &model{max: max, index: map[string]int{}} }

func (m *model) get(key string) *row {
	if i, ok := m.index[key]; ok {
		return m.slots[i]
	}
	return nil
}

func (e *row) full(now mono.Time) bool {
	return e.bucket.Tokens(now) >= tokenbucket.Tokens(e.bucket.Share().Burst)*tokenbucket.Token
}

func (e *row) byDefault() bool { return e.rule.Key != e.key || e.rule.Default() }

func (m *model) touch(e *row) { e.changed = [2]bool{true, true} }

func (m *model) Ask(key string, cost int64, now mono.Time, peek bool) table.Verdict {
	e := m.get(key)
	if e == nil {
		return table.Verdict{}
	}
	b := e.bucket
	share, scale := e.rule.Bucket()
	admit, retry := b.Admit(cost*scale, now)
	v := table.Verdict{
		Known: true, Admit: admit || e.rule.Shadow, Denied: !admit, Shadow: e.rule.Shadow, Default: e.byDefault(), Retry: retry,
	}
	if e.rule.Strict && !m.alone() {
		admit, b = false, e.bucket
		v.Admit, v.Denied, v.Retry = v.Shadow, true, time.Second
	}
	v.Left = int64(max(0, b.Tokens(now))/tokenbucket.Token) / scale
	whole := b
	_, v.Full = whole.Admit(share.Burst, now)
	switch {
	case peek:
	case admit:
		e.bucket = b
		m.touch(e)
	default:
		e.denied++
	}
	return v
}

func (m *model) Learn(key string, r *rule.Rule, credits tokenbucket.Tokens, now mono.Time) bool {
	if m.get(key) != nil {
		return true
	}
	if len(m.index) >= m.max && !m.evict(now) {
		return false
	}
	i := len(m.slots)
	if n := len(m.free); n > 0 {
		i, m.free = m.free[n-1], m.free[:n-1]
	} else {
		m.slots = append(m.slots, nil)
	}
	e := &row{key: key, rule: *r}
	share, scale := r.Bucket()
	e.bucket.Retune(now, share, max(0, credits)*tokenbucket.Tokens(scale))
	m.slots[i], m.index[key] = e, i
	return true
}

func (m *model) evict(now mono.Time) bool {
	for range m.slots {
		i := m.hand
		m.hand = (m.hand + 1) % len(m.slots)
		if e := m.slots[i]; e != nil && !e.changed[table.Saver] && e.full(now) {
			m.Forget(e.key)
			return true
		}
	}
	return false
}

func (m *model) Forget(key string) {
	if i, ok := m.index[key]; ok {
		delete(m.index, key)
		m.slots[i], m.free = nil, append(m.free, i)
	}
}

func (m *model) Follow(key string, r *rule.Rule, now mono.Time) bool {
	e := m.get(key)
	if e == nil {
		return false
	}
	if r.Change >= e.rule.Change {
		_, before := e.rule.Bucket()
		e.rule = *r
		if share, scale := r.Bucket(); e.bucket.Share() != share || before != scale {
			b := e.bucket
			if _, wait := b.Admit(0, now); wait != math.MaxInt64 {
				now = now.Add(wait)
			}
			var more tokenbucket.Tokens
			if before != scale {
				more = e.bucket.Retune(now, tokenbucket.Share{}, 0) / tokenbucket.Tokens(before) * tokenbucket.Tokens(scale)
			}
			e.bucket.Retune(now, share, more)
			m.touch(e)
		}
	}
	return true
}

// each calls f for n slots, beginning at slot from, and returns the slot to continue with.
func (m *model) each(from, n int32, f func(e *row)) (next int32) {
	for i := from; i < int32(len(m.slots)); i++ {
		if i == from+n {
			return i
		}
		if m.slots[i] != nil {
			f(m.slots[i])
		}
	}
	return 0
}

// some calls f for up to n slots, beginning at slot from, for which is returns true.
func (m *model) some(from, n int32, is func(e *row) bool, f func(e *row)) (next int32) {
	for i := from; i < int32(len(m.slots)); i++ {
		if e := m.slots[i]; e != nil && is(e) {
			if n == 0 {
				return i
			}
			n--
			f(e)
		}
	}
	return 0
}

func (e *row) credit(now table.Now) table.Credit {
	_, scale := e.rule.Bucket()
	return table.Credit{Key: e.key, At: now.Wall, Credits: e.bucket.Tokens(now.Mono) / tokenbucket.Tokens(scale)}
}

func (m *model) Changed(by table.Reader, to []table.Credit, of func(int) bool, from, n int32, now table.Now) ([]table.Credit, int32) {
	next := m.some(from, n, func(e *row) bool { return e.changed[by] }, func(e *row) {
		if of != nil && !of(rule.Partition(e.key, rule.Partitions)) {
			return
		}
		e.changed[by] = false
		if e.rule.Strict || !e.full(now.Mono) {
			to = append(to, e.credit(now))
		}
	})
	return to, next
}

func (m *model) MostDenied(many int) (most []table.Denied) {
	m.each(0, math.MaxInt32, func(e *row) {
		if e.denied > 0 {
			most = append(most, table.Denied{Key: e.key, Times: e.denied})
		}
	})
	slices.SortStableFunc(most, func(a, b table.Denied) int { return cmp.Compare(b.Times, a.Times) })
	return most[:min(many, len(most))]
}

func (m *model) Nearest(limit int, now mono.Time) (near []table.Near) {
	m.each(0, math.MaxInt32, func(e *row) {
		if e.denied == 0 && e.full(now) {
			return
		}
		_, scale := e.rule.Bucket()
		tokens, burst := max(0, e.bucket.Tokens(now)), e.bucket.Share().Burst
		one := table.Near{
			Key: e.key, Left: int64(tokens/tokenbucket.Token) / scale, Capacity: burst / scale,
			Denied: e.denied, Default: e.byDefault(), Shadow: e.rule.Shadow,
		}
		if burst > 0 {
			one.Part = float64(tokens) / float64(tokenbucket.Token) / float64(burst)
		}
		near = append(near, one)
	})
	slices.SortStableFunc(near, table.Nearer)
	return near[:min(limit, len(near))]
}

// A shard answers as the model does after any sequence of operations, also when keys collide in the
// index and arenas are moved.
func TestShardIsItsModel(t *testing.T) {
	longest := 0
	rapid.Check(t, func(t *rapid.T) {
		capacity := rapid.SampledFrom([]int{3, 40, 700}).Draw(t, "max")
		s, m, alone := table.New(capacity), newModel(capacity), true
		s.Collide(1 << rapid.SampledFrom([]int{2, 5, 32}).Draw(t, "hashes"))
		s.Alone = func() bool { return alone }
		m.alone = s.Alone
		now, d, change := at(0), rule.Defaults{}, uint64(0)
		keyOf := func(i int) string {
			return fmt.Sprint(i%3, "/", i, strings.Repeat("x", (i*i+7)%250))
		}
		drawRule := func(key string) *rule.Rule {
			change++
			return &rule.Rule{
				Period: rapid.SampledFrom([]int64{0, 0, 1, 7, 60}).Draw(t, "period"),
				Key:    rapid.SampledFrom([]string{key, "", "1/*"}).Draw(t, "rule of"),
				Share:  tokenbucket.Share{Rate: tokenbucket.Rate(rapid.Int64Range(1, 5000).Draw(t, "A")), Burst: rapid.Int64Range(1, 5).Draw(t, "C")},
				Strict: rapid.IntRange(0, 20).Draw(t, "strict") == 0,
				Shadow: rapid.Bool().Draw(t, "shadow"),
				Change: change - min(change, rapid.Uint64Range(0, 2).Draw(t, "late")),
			}
		}
		equal := func(what string, is, want any) {
			if !reflect.DeepEqual(is, want) {
				t.Fatalf("%s: %+v, want %+v", what, is, want)
			}
		}
		var kept, keptWant []table.Credit
		most := 0
		steps := rapid.IntRange(1, 100).Draw(t, "steps")
		for range steps {
			later := time.Duration(rapid.Int64Range(0, 2e9).Draw(t, "ns"))
			now.Mono, now.Wall = now.Mono.Add(later), now.Wall+later
			number := rapid.IntRange(0, 2*capacity).Draw(t, "key")
			key, n := keyOf(number), int32(rapid.IntRange(1, 2*capacity).Draw(t, "n"))
			of := func(p int) bool { return p%4 == number%4 }
			switch rapid.IntRange(0, 13).Draw(t, "what") {
			case 0, 1, 2:
				cost, peek := rapid.Int64Range(0, 6).Draw(t, "cost"), rapid.Bool().Draw(t, "peek")
				for i := number; i <= number+int(n); i++ {
					equal("ask", s.Ask([]byte(keyOf(i)), cost, now.Mono, peek), m.Ask(keyOf(i), cost, now.Mono, peek))
				}
			case 3, 4:
				r, credits := drawRule(key), tokenbucket.Tokens(rapid.Int64Range(-1, 6000).Draw(t, "credits"))
				for i := number; i <= number+int(n); i++ {
					from := now.Mono.Add(time.Duration(i%2) * time.Second)
					equal("learn", s.Learn(keyOf(i), r, credits, from), m.Learn(keyOf(i), r, credits, from))
				}
			case 5:
				r := drawRule(key)
				equal("follow", s.Follow(key, r, now.Mono), m.Follow(key, r, now.Mono))
			case 6:
				for i := number; i <= number+int(n); i += 2 {
					s.Forget(keyOf(i))
					m.Forget(keyOf(i))
				}
			case 7, 8:
				by := table.Reader(rapid.IntRange(0, 1).Draw(t, "reader"))
				filter := []func(int) bool{nil, of}[number%2]
				for from := int32(0); ; {
					is, next := s.Changed(by, nil, filter, from, n, now)
					want, nextWant := m.Changed(by, nil, filter, from, n, now)
					equal("changed", is, want)
					equal("next", next, nextWant)
					kept, keptWant = append(kept, is...), append(keptWant, want...)
					if from = next; next == 0 {
						break
					}
				}
			case 9:
				s.Restart()
				m.each(0, math.MaxInt32, func(e *row) { e.changed[table.Sender] = e.changed[table.Saver] })
			case 10:
				by := table.Reader(rapid.IntRange(0, 1).Draw(t, "reader"))
				is, _ := s.Changed(by, nil, nil, 0, n, now)
				m.Changed(by, nil, nil, 0, n, now)
				s.Unread(by, is)
				for _, c := range is {
					if e := m.get(c.Key); by == table.Saver {
						m.touch(e)
					} else {
						e.changed[by] = true
					}
				}
			case 11:
				for from := int32(0); ; {
					next := s.Drop(of, from, n)
					equal("drop", next, m.each(from, n, func(e *row) {
						if of(rule.Partition(e.key, rule.Partitions)) {
							m.Forget(e.key)
						}
					}))
					if from = next; next == 0 {
						break
					}
				}
			case 12:
				r := drawRule("2/*")
				r.Key = "2/*"
				d.Set(*r)
				late := change - min(change, rapid.Uint64Range(0, 9).Draw(t, "as of"))
				for from := int32(0); ; {
					next := s.Undefault(&d, late, from, n, now.Mono)
					equal("defaults", next, m.each(from, n, func(e *row) {
						if e.byDefault() {
							r := d.For(e.key)
							r.Change = max(late, e.rule.Change)
							m.Follow(e.key, &r, now.Mono)
						}
					}))
					if from = next; next == 0 {
						break
					}
				}
			default:
				alone = !alone
			}
			equal("keys", s.Len(), len(m.index))
			var denied []table.Denied
			for from, next := int32(0), int32(-1); next != 0; from = next {
				denied, next = s.MostDenied(denied, 5, from, n)
			}
			want := m.MostDenied(5)
			equal("how many were denied", len(denied), len(want))
			for i, d := range denied {
				equal("times", d.Times, want[i].Times)
				equal("of a key", m.get(d.Key).denied, d.Times)
			}
			var near []table.Near
			for from, next := int32(0), int32(-1); next != 0; from = next {
				near, next = s.Nearest(near, 5, from, n, now.Mono)
			}
			wantNear := m.Nearest(5, now.Mono)
			equal("how many are near their limit", len(near), len(wantNear))
			for i, one := range near {
				equal("part left", one.Part, wantNear[i].Part)
				equal("denied", one.Denied, wantNear[i].Denied)
				e := m.get(one.Key)
				equal("capacity", one.Capacity, e.rule.Share.Burst)
				equal("is shadow", one.Shadow, e.rule.Shadow)
				equal("is by default", one.Default, e.byDefault())
				if one.Part == 1 && one.Denied == 0 {
					t.Fatalf("%s is full and was not denied", one.Key)
				}
			}
			all, live, arenas := s.Text()
			if most = max(most, live); all > 2*live+2<<14 || arenas > most>>13+4 {
				t.Fatalf("keys take %d bytes in %d arenas, %d bytes are in use, and were %d", all, arenas, live, most)
			}
		}
		equal("what was returned before", kept, keptWant)
		longest = max(longest, most)
	})
	if longest < 4<<14 {
		t.Errorf("no more than %d bytes of keys at once", longest)
	}
}

// A request that was charged and refunded leaves the key with at most the credits it would have
// without the request, and soon after with nearly as many.
func TestRefundIsNoCredit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := &rule.Rule{
			Key:    "key",
			Share:  tokenbucket.Share{Rate: tokenbucket.Rate(rapid.Int64Range(1, 5000).Draw(t, "A")), Burst: rapid.Int64Range(1, 20).Draw(t, "C")},
			Period: rapid.SampledFrom([]int64{1, 7, 3600}).Draw(t, "period"),
		}
		charged, never := table.New(1), table.New(1)
		now := mono.Time(rapid.Int64Range(0, 1e12).Draw(t, "start"))
		credits := tokenbucket.Tokens(rapid.Int64Range(0, 20_000).Draw(t, "credits"))
		charged.Learn("key", r, credits, now)
		never.Learn("key", r, credits, now)
		held := func(s *table.Shard) tokenbucket.Tokens { return s.Credit("key", now) }
		fill := int64(1e12) * r.Share.Burst * r.Period / int64(r.Share.Rate)
		pass := func() { now += mono.Time(rapid.Int64Range(0, fill).Draw(t, "ns")) }
		both := func() {
			for range rapid.IntRange(0, 5).Draw(t, "others") {
				pass()
				cost := rapid.Int64Range(0, r.Share.Burst).Draw(t, "other cost")
				if charged.Ask([]byte("key"), cost, now, false).Admit && !never.Ask([]byte("key"), cost, now, false).Admit {
					t.Fatalf("cost %d is admitted only where another was refunded", cost)
				}
			}
		}
		both()
		pass()
		cost, took := rapid.Int64Range(1, r.Share.Burst).Draw(t, "cost"), now
		if !charged.Ask([]byte("key"), cost, now, false).Admit {
			return
		}
		both()
		pass()
		before, age := held(charged), now.Sub(took)
		charged.Refund([]byte("key"), cost, age, now)
		if is, most := held(charged), held(never); is > most {
			t.Fatalf("it holds %d after the refund, %d without the request", is, most)
		}
		earned := tokenbucket.Tokens(float64(r.Share.Rate) * age.Seconds() / float64(r.Period))
		if is, least := held(charged), min(before+tokenbucket.Tokens(cost)*tokenbucket.Token-earned-2, tokenbucket.Tokens(r.Share.Burst)*tokenbucket.Token); is < least {
			t.Fatalf("it holds %d after the refund of %d after %v, and %d before; want %d", is, cost, age, before, least)
		}
		both()
	})
}

// Keys that come and go leave nothing behind.
func TestKeysThatGoAreNotKept(t *testing.T) {
	s := table.New(1)
	for i := range 10_000 {
		key := fmt.Sprint("tenant/", i)
		s.Learn(key, &rule.Rule{}, 0, 0)
		s.Forget(key)
	}
	if all, live, arenas := s.Text(); all > 1<<14 || live != 0 || arenas > 2 {
		t.Errorf("no key takes %d bytes in %d arenas, of which %d in use", all, arenas, live)
	}
}
