package server

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// asked records the number of keys in each lookup of the store.
type asked struct {
	*memory
	rules, credits []int
}

func (a *asked) RulesOf(ctx context.Context, keys []string) (map[string]rule.Rule, error) {
	a.rules = append(a.rules, len(keys))
	return a.memory.RulesOf(ctx, keys)
}

func (a *asked) Credits(ctx context.Context, keys []string) (map[string]table.Credit, error) {
	a.credits = append(a.credits, len(keys))
	return a.memory.Credits(ctx, keys)
}

// Keys that wait together are looked up together, and each key gets its own rule.
func TestKeysAreLookedUpTogether(t *testing.T) {
	const keys, own = keysAtOnce + 44, 7
	burst := func(i int) int64 { return int64(i + 1) }
	var rules []rule.Rule
	for i := range keys {
		if i%own == 0 {
			rules = append(rules, rule.Rule{Key: fmt.Sprint("key/", i), Share: tokenbucket.Share{Rate: 1000, Burst: burst(i)}})
		}
	}
	a := &asked{memory: newMemory(rules)}
	s, err := New(t.Context(), Config{Address: "127.0.0.1:0", Advertise: "one", Store: NewStore(a), Now: func() table.Now { return table.Now{Wall: time.Hour} }})
	testkit.Must(t, err)
	for i := range keys {
		if key := fmt.Sprint("key/", i); s.lookups.add(key, pending{}) != waits {
			t.Fatalf("no room for %s", key)
		}
	}
	for _, none := range []string{"", "\xff", "a\nb"} {
		if s.lookups.add(none, pending{}) != noKey {
			t.Errorf("the store would be asked for %q", none)
		}
	}
	for len(s.lookups.queue) > 0 {
		some := s.lookups.next(<-s.lookups.queue)
		s.learn(t.Context(), some)
		for _, k := range some {
			var i int
			testkit.Result(fmt.Sscanf(k.key, "key/%d", &i)).Must(t)
			if has := k.rule != nil; has != (i%own == 0) || has && k.rule.Share.Burst != burst(i) {
				t.Errorf("%s has the rule %+v", k.key, k.rule)
			}
		}
	}
	if want := []int{keysAtOnce, keys - keysAtOnce}; !slices.Equal(a.rules, want) || !slices.Equal(a.credits, want) {
		t.Errorf("asked for %d rules and %d credits, want %d", a.rules, a.credits, want)
	}
}

// stalling is a store whose lookups of keys wait until the test releases them.
type stalling struct {
	*memory
	stalled chan chan struct{} // a lookup waits until the channel is closed; nil: no lookup waits
	changes []store.Change     // of rules, besides the changes that memory has
}

func (s *stalling) stall(ctx context.Context) error {
	release := make(chan struct{})
	select {
	case s.stalled <- release:
		<-release
	case <-ctx.Done():
	}
	return ctx.Err()
}

func (s *stalling) Credits(ctx context.Context, keys []string) (map[string]table.Credit, error) {
	if s.stalled != nil {
		if err := s.stall(ctx); err != nil {
			return nil, err
		}
	}
	return s.memory.Credits(ctx, keys)
}

func (s *stalling) Changes(_ context.Context, after uint64, _ int) (some []store.Change, err error) {
	for _, c := range s.changes {
		if c.Rule.Change > after {
			some = append(some, c)
		}
	}
	return some, nil
}

// While the store delays a lookup, the server decides keys in memory and follows edits. The key that
// is looked up gets the rule that is current at the end.
func TestLookupsHoldUpNothing(t *testing.T) {
	rated := func(key string, burst int64, change uint64) rule.Rule {
		return rule.Rule{Key: key, Change: change, Share: tokenbucket.Share{Rate: 1000, Burst: burst}}
	}
	slow := &stalling{memory: newMemory([]rule.Rule{rated("here", 10, 0), rated("new", 10, 0)})}
	s, err := New(t.Context(), Config{Address: "127.0.0.1:0", Advertise: "one", Store: NewStore(slow), Now: func() table.Now { return table.Now{Wall: time.Hour} }})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.learn(t.Context(), []*lookup{{key: "here"}})

	slow.stalled = make(chan chan struct{})
	ended := make(chan error)
	key := &lookup{key: "new"}
	go func() {
		s.learn(t.Context(), []*lookup{key})
		ended <- key.err
	}()
	release := <-slow.stalled
	slow.changes = []store.Change{{Rule: rated("here", 20, 1)}, {Rule: rated("new", 30, 2)}}
	slow.memory.rules["new"] = slow.changes[1].Rule
	followed := make(chan error)
	go func() { followed <- s.rules.poll(t.Context()) }()
	select {
	case err = <-followed:
	case <-time.After(30 * time.Second):
		t.Error("an edit waits for a lookup that the store keeps waiting")
		close(release)
		<-followed
		<-ended
		return
	}
	if v, here := s.decide([]byte("here"), 1, 0, true); err != nil || !here || !v.Known || s.State().Change != 2 {
		t.Errorf("meanwhile: %v, %+v, %+v", err, v, s.State())
	}
	close(release)
	close(<-slow.stalled) // what was read before the edit is read again
	if err := <-ended; err != nil || key.rule.Share.Burst != 30 {
		t.Errorf("%v, %+v", err, key.rule)
	}
	if v, _ := s.decide([]byte("new"), 30, 0, true); !v.Admit {
		t.Errorf("by the rule of before: %+v", v)
	}
}
