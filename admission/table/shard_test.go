package table_test

import (
	"fmt"
	"math"
	"math/big"
	"runtime"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func at(d time.Duration) table.Now {
	return table.Now{Mono: mono.Time(d), Wall: 1_700_000_000*time.Second + d}
}

func TestAskFollowsTheRule(t *testing.T) {
	s := table.New(10)
	key := []byte("user/1")
	if v := s.Ask(key, 1, 0, false); v.Known {
		t.Fatalf("%+v of a key that it was not taught", v)
	}
	r := &rule.Rule{Key: "user/1", Share: tokenbucket.Share{Rate: 1000, Burst: 3}}
	if !s.Learn("user/1", r, table.Held(nil, r, at(0)), 0) {
		t.Fatal("no room")
	}
	for i, test := range []struct {
		cost  int64
		after time.Duration
		peek  bool
		admit bool
		left  int64
		retry time.Duration
	}{
		{1, 0, false, true, 2, 0},
		{2, 0, true, true, 0, 0},
		{2, 0, false, true, 0, 0},
		{1, 400 * time.Millisecond, false, false, 0, 600 * time.Millisecond},
		{1, 600 * time.Millisecond, false, true, 0, 0},
		{3, 0, false, false, 0, 3 * time.Second},
		{4, time.Hour, false, false, 3, math.MaxInt64},
		{3, 0, false, true, 0, 0},
	} {
		now += mono.Time(test.after)
		v := s.Ask(key, test.cost, now, test.peek)
		if !v.Known || v.Admit != test.admit || v.Denied == test.admit || v.Left != test.left || v.Retry != test.retry {
			t.Errorf("question %d: %+v, want %+v", i, v, test)
		}
	}
	testkit.Equal(t, table.Millis(time.Millisecond+1), 2, "ms")
}

// While another server may decide for a strict key, the shard denies the key and charges nothing.
// Other keys are judged.
func TestAStrictKeyOfWhichAnotherMayDecide(t *testing.T) {
	s, alone := table.New(10), false
	s.Alone = func() bool { return alone }
	for _, strict := range []bool{true, false} {
		r := &rule.Rule{Key: fmt.Sprint(strict), Strict: strict, Share: tokenbucket.Share{Rate: 1000, Burst: 3}}
		if !s.Learn(r.Key, r, table.Held(nil, r, at(0)), 0) {
			t.Fatal("no room")
		}
	}
	if v := s.Ask([]byte("true"), 2, 0, false); v.Admit || !v.Denied || v.Retry <= 0 {
		t.Errorf("a strict key: %+v", v)
	}
	if v := s.Ask([]byte("false"), 2, 0, false); !v.Admit {
		t.Errorf("another: %+v", v)
	}
	alone = true
	if v := s.Ask([]byte("true"), 3, 0, false); !v.Admit {
		t.Errorf("a strict key that has been charged nothing: %+v", v)
	}
}

var now mono.Time

func TestWhatARuleSays(t *testing.T) {
	s := table.New(10)
	deny := &rule.Rule{}
	s.Learn("nobody's", deny, 0, 0)
	if v := s.Ask([]byte("nobody's"), 1, 0, false); v.Admit || !v.Default || v.Retry != math.MaxInt64 {
		t.Errorf("without any rule: %+v", v)
	}
	s.Learn("shadow", &rule.Rule{Key: "shadow", Shadow: true, Strict: true}, 0, 0)
	if v := s.Ask([]byte("shadow"), 1, 0, false); !v.Admit || !v.Denied || !v.Shadow || v.Default {
		t.Errorf("shadow: %+v", v)
	}
	// A rule arrives, an older version of the rule arrives late, and the rule is deleted.
	own := &rule.Rule{Key: "nobody's", Share: tokenbucket.Share{Rate: 1000, Burst: 5}, Change: 7}
	if !s.Follow("nobody's", own, 0) || s.Follow("unknown", own, 0) {
		t.Error("Follow does not say which key it has")
	}
	if v := s.Ask([]byte("nobody's"), 1, 0, false); v.Admit || v.Default || v.Retry != time.Second {
		t.Errorf("a rule that came brought credits: %+v", v)
	}
	s.Follow("nobody's", &rule.Rule{Key: "nobody's", Change: 6}, 0)
	if v := s.Ask([]byte("nobody's"), 1, mono.Time(time.Second), false); !v.Admit {
		t.Errorf("an older version of a rule took its place: %+v", v)
	}
	var d rule.Defaults
	gone := d.For("nobody's")
	gone.Change = 8
	s.Follow("nobody's", &gone, 0)
	if v := s.Ask([]byte("nobody's"), 1, mono.Time(time.Hour), false); v.Admit || !v.Default {
		t.Errorf("a rule was deleted: %+v", v)
	}
}

func TestDefaultsChange(t *testing.T) {
	s := table.New(3000)
	var d rule.Defaults
	d.Set(rule.Rule{Key: "ip/*", Share: tokenbucket.Share{Rate: 1000, Burst: 1}, Change: 1})
	for i := range 2000 {
		key := fmt.Sprint("ip/", i)
		r := d.For(key)
		s.Learn(key, &r, tokenbucket.Token, 0)
	}
	own := &rule.Rule{Key: "ip/own", Share: tokenbucket.Share{Rate: 1, Burst: 1}, Change: 2}
	s.Learn("ip/own", own, 0, 0)
	undefault := func(change uint64) (turns int) {
		for next := s.Undefault(&d, change, 0, 300, 0); next != 0; turns++ {
			next = s.Undefault(&d, change, next, 300, 0)
		}
		return turns
	}
	d.Set(rule.Rule{Key: "ip/1*", Share: tokenbucket.Share{Rate: 2000, Burst: 9}, Change: 3})
	testkit.Equal(t, undefault(3), 6, "turns")
	d.Delete("ip/1*") // and back to a default with an older change
	undefault(4)
	d.Delete("ip/*")
	undefault(5)
	if v := s.Ask([]byte("ip/7"), 1, 0, false); v.Admit {
		t.Errorf("the default was deleted: %+v", v)
	}
	if v := s.Ask([]byte("ip/own"), 1, mono.Time(1000*time.Second), false); !v.Admit || v.Default {
		t.Errorf("a key with a rule of its own: %+v", v)
	}
	d.Set(rule.Rule{Key: "ip/1*", Share: tokenbucket.Share{Rate: 2000, Burst: 9}, Change: 6})
	undefault(6)
	if v := s.Ask([]byte("ip/11"), 9, mono.Time(5*time.Second), false); !v.Admit || !v.Default {
		t.Errorf("a longer default came: %+v", v)
	}
}

// A full key is never saved. Without its saved credit, the next owner begins a strict key empty.
func TestWhatIsFullIsNotSaved(t *testing.T) {
	share := tokenbucket.Share{Rate: 1000, Burst: 5}
	s := table.New(2)
	for _, strict := range []bool{false, true} {
		s.Learn(fmt.Sprint(strict), &rule.Rule{Key: fmt.Sprint(strict), Share: share, Strict: strict}, 5*tokenbucket.Token, 0)
		if v := s.Ask([]byte(fmt.Sprint(strict)), 2, 0, false); !v.Admit {
			t.Fatalf("%+v", v)
		}
	}
	for _, test := range []struct {
		now  time.Duration
		want []string
	}{{2*time.Second - 1, []string{"false", "true"}}, {2 * time.Second, []string{"true"}}} {
		changed, next := s.Changed(table.Saver, nil, nil, 0, 2, at(test.now))
		var got []string
		for _, c := range changed {
			got = append(got, c.Key)
		}
		if !slices.Equal(got, test.want) || next != 0 || s.Dirty() != 0 {
			t.Errorf("after %v %q are saved, want %q; %d left", test.now, got, test.want, s.Dirty())
		}
		s.Unread(table.Saver, changed)
	}
}

// The guarantee: each key is admitted at most C + A*t in any interval t, through evictions, restarts
// and moves to another shard and back, in any order. Without any of these events the shard's answers
// are exact.
func TestEnvelope(t *testing.T) {
	type admission struct {
		cost int64
		at   time.Duration
	}
	rapid.Check(t, func(t *rapid.T) {
		share := tokenbucket.Share{Rate: tokenbucket.Rate(rapid.Int64Range(1, 5000).Draw(t, "A")), Burst: rapid.Int64Range(1, 5).Draw(t, "C")}
		rules := func(key string) *rule.Rule { return &rule.Rule{Key: key, Share: share} }
		shards := []*table.Shard{table.New(3), table.New(3)}
		store := map[string]table.Credit{}
		admitted := map[string][]admission{}
		var now time.Duration
		save := func(s *table.Shard, n int) {
			changed, _ := s.Changed(table.Saver, nil, nil, 0, int32(n), at(now))
			for _, c := range changed {
				store[c.Key] = c
			}
		}
		owner := [rule.Partitions]int{}
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			now += time.Duration(rapid.Int64Range(0, 2e9).Draw(t, "ns"))
			key := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f"}).Draw(t, "key")
			p := rule.Partition(key, rule.Partitions)
			it := func(of int) bool { return of == p }
			s := shards[owner[p]]
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0:
				save(s, rapid.IntRange(0, 3).Draw(t, "n"))
			case 1: // could not be written
				changed, _ := s.Changed(table.Saver, nil, nil, 0, 2, at(now))
				s.Unread(table.Saver, changed)
			case 2: // the partition moves: frozen, exported, imported
				before := s.Dirty()
				moved, next := s.Changed(table.Saver, nil, it, 0, math.MaxInt32, at(now))
				if next != 0 || s.Dirty() > before-len(moved) {
					t.Fatalf("%d changed, %d left, and then %d", before, len(moved), s.Dirty())
				}
				if rapid.Bool().Draw(t, "fails") {
					s.Unread(table.Saver, moved)
					continue
				}
				for _, c := range moved {
					store[c.Key] = c
				}
				s.Drop(it, 0, math.MaxInt32)
				owner[p] = 1 - owner[p]
			case 3:
				save(s, 10)
				s.Forget(key)
			default:
				cost := rapid.Int64Range(0, 6).Draw(t, "cost")
				v := s.Ask([]byte(key), cost, mono.Time(now), false)
				if !v.Known {
					var held *table.Credit
					if c, ok := store[key]; ok {
						held = &c
					}
					if !s.Learn(key, rules(key), table.Held(held, rules(key), at(now)), mono.Time(now)) {
						continue // the shard is full of other keys
					}
					if v = s.Ask([]byte(key), cost, mono.Time(now), false); !v.Known {
						t.Fatalf("key %s is not known after it was learned", key)
					}
				}
				if v.Admit {
					admitted[key] = append(admitted[key], admission{cost, now})
				}
			}
			for _, s := range shards {
				if s.Len() > 3 {
					t.Fatalf("%d keys", s.Len())
				}
			}
		}
		for key, all := range admitted {
			for i := range all {
				sum := int64(0)
				for j := i; j < len(all); j++ {
					sum += all[j].cost
					most := big.NewRat(int64(share.Rate)*int64(all[j].at-all[i].at), 1e12)
					if most.Add(most, big.NewRat(share.Burst, 1)); big.NewRat(sum, 1).Cmp(most) > 0 {
						t.Fatalf("key %s, %v: %d admitted from %v to %v", key, share, sum, all[i].at, all[j].at)
					}
				}
			}
		}
	})
}

func TestAClockThatIsSetBackBringsNothing(t *testing.T) {
	r := &rule.Rule{Key: "k", Share: tokenbucket.Share{Rate: 1000, Burst: 10}}
	c := &table.Credit{Key: "k", Credits: 2500, At: at(0).Wall}
	for _, test := range []struct {
		after time.Duration
		want  tokenbucket.Tokens
	}{{-time.Hour, 2500}, {0, 2500}, {time.Second, 3500}, {time.Hour, 10_000}, {math.MaxInt64 - at(0).Wall, 10_000}} {
		testkit.Equal(t, table.Held(c, r, table.Now{Mono: 5, Wall: at(0).Wall + test.after}), test.want, "after %v", test.after)
	}
}

// Measures the memory of a key of 20 bytes, and checks that a decision allocates nothing. The
// collector lets a process grow to twice the memory in use, so the budget is 200 bytes a key.
func TestKeyFitsTheMemoryBudget(t *testing.T) {
	const keys = 1 << 18
	r := &rule.Rule{Key: "*", Share: tokenbucket.Share{Rate: 1000, Burst: 10}}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	shards := make([]*table.Shard, 64)
	for i := range shards {
		shards[i] = table.New(keys)
	}
	for i := range keys {
		shards[i%64].Learn(fmt.Sprintf("tenant/%013d", i), r, 0, 0)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if per := (after.HeapAlloc - before.HeapAlloc) / keys; per > 105 {
		t.Errorf("%d bytes per key", per)
	} else {
		t.Logf("%d bytes per key", per)
	}
	key, now := []byte(fmt.Sprintf("tenant/%013d", 5)), mono.Time(0)
	var changed []table.Credit
	testkit.Equal(t, testing.AllocsPerRun(1000, func() {
		now += mono.Time(time.Second)
		if v := shards[5].Ask(key, 1, now, false); !v.Admit {
			t.Fatalf("%+v", v)
		}
		changed, _ = shards[5].Changed(table.Saver, changed[:0], nil, 0, 1, table.Now{Mono: now})
	}), 0, "allocations a decision")
}

func BenchmarkAsk(b *testing.B) {
	s := table.New(1)
	s.Learn("tenant/acme/http", &rule.Rule{Key: "*", Share: tokenbucket.Share{Rate: 1e9, Burst: 1000}}, 0, 0)
	key, now := []byte("tenant/acme/http"), mono.Time(0)
	b.ReportAllocs()
	for b.Loop() {
		now += 1000
		s.Ask(key, 1, now, false)
	}
}

// Full strict keys make room for others. Otherwise a shard with many strict keys would refuse new keys
// for ever.
func TestStrictKeysMakeRoom(t *testing.T) {
	s := table.New(1)
	for _, key := range []string{"a", "b"} {
		r := &rule.Rule{Key: key, Strict: true, Share: tokenbucket.Share{Rate: 1000, Burst: 1}}
		testkit.Equal(t, s.Learn(key, r, tokenbucket.Token, 0), true, key)
	}
}

// A year of questions at odd times: a key whose rule refills 100 a day has been admitted exactly its
// capacity and 36,500 more at the end.
func TestRefillDoesNotDrift(t *testing.T) {
	s, key := table.New(1), []byte("key")
	s.Learn("key", &rule.Rule{Key: "key", Share: tokenbucket.Share{Rate: 100_000, Burst: 100}, Period: 86_400}, 100*tokenbucket.Token, 0)
	const year = mono.Time(365 * 24 * time.Hour)
	admitted, last := 0, mono.Time(0)
	for now := mono.Time(0); now < year; now += 317*mono.Time(time.Second) + 12_345_679 {
		for s.Ask(key, 1, now, false).Admit {
			admitted++
		}
		last = now
	}
	testkit.Equal(t, admitted, 100+int(int64(last)/int64(864*time.Second)), "admitted in a year")
	v := s.Ask(key, 1, year, false)
	testkit.Equal(t, v.Admit, true, "at the end of the year, to the nanosecond")
	testkit.Equal(t, s.Ask(key, 1, year, false).Retry, 864*time.Second, "until the next")
	testkit.Equal(t, s.Ask(key, 1, year+mono.Time(864*time.Second)-1, false).Admit, false, "a nanosecond before it")
}
