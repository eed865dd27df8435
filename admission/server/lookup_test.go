package server

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/tokenbucket"
)

// asked notes how many keys each question to the store is about.
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

// Keys that wait together are asked for together, and each gets what is its own.
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
	s, err := New(t.Context(), Config{Address: "127.0.0.1:0", Advertise: "one", Store: a, Now: func() table.Now { return table.Now{Wall: time.Hour} }})
	if err != nil {
		t.Fatal(err)
	}
	for i := range keys {
		if key := fmt.Sprint("key/", i); !s.lookups.add(key, pending{}) {
			t.Fatalf("no room for %s", key)
		}
	}
	for _, none := range []string{"", "\xff", "a\nb"} {
		if s.lookups.add(none, pending{}) {
			t.Errorf("the store would be asked for %q", none)
		}
	}
	for len(s.lookups.queue) > 0 {
		some := s.lookups.next(<-s.lookups.queue)
		s.learn(t.Context(), some)
		for _, k := range some {
			var i int
			if _, err := fmt.Sscanf(k.key, "key/%d", &i); err != nil {
				t.Fatal(err)
			}
			if has := k.own != nil; has != (i%own == 0) || has && k.own.Share.Burst != burst(i) {
				t.Errorf("%s has the rule %+v", k.key, k.own)
			}
		}
	}
	if want := []int{keysAtOnce, keys - keysAtOnce}; !slices.Equal(a.rules, want) || !slices.Equal(a.credits, want) {
		t.Errorf("asked for %d rules and %d credits, want %d", a.rules, a.credits, want)
	}
}
