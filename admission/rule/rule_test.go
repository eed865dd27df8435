package rule_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestValidate(t *testing.T) {
	for _, test := range []struct {
		name string
		r    rule.Rule
		want string // "" for none
	}{
		{"plain", rule.Rule{Key: "user/1", Share: tokenbucket.Share{Rate: 100_000, Burst: 10}}, ""},
		{"denies", rule.Rule{Key: "user/1"}, ""},
		{"default", rule.Rule{Key: "ip/*", Share: tokenbucket.Share{Rate: 1, Burst: 1}}, ""},
		{"longest key", rule.Rule{Key: strings.Repeat("é", 128)}, ""},
		{"no key", rule.Rule{}, "key of 0 bytes"},
		{"long key", rule.Rule{Key: strings.Repeat("x", 257)}, "key of 257 bytes"},
		{"not UTF-8", rule.Rule{Key: "\xff"}, "not UTF-8"},
		{"control", rule.Rule{Key: "a\nb"}, "control character"},
		{"no refill", rule.Rule{Key: "k", Share: tokenbucket.Share{Burst: 5}}, "refill 0"},
		{"no capacity", rule.Rule{Key: "k", Share: tokenbucket.Share{Rate: 5}}, "capacity 0: want 1 to 1000000000 credits"},
		{"too fast", rule.Rule{Key: "k", Share: tokenbucket.Share{Rate: 1e13, Burst: 1}}, "refill 10000000000: want 0.001 to 1000000000 credits per second"},
		{"a day", rule.Rule{Key: "k", Share: tokenbucket.Share{Rate: 100_000, Burst: 100}, Period: 86_400}, ""},
		{"no period", rule.Rule{Key: "k", Share: tokenbucket.Share{Rate: 1, Burst: 1}, Period: -1}, "refill period -1: want 1 to 31622400 seconds"},
		{"two years", rule.Rule{Key: "k", Share: tokenbucket.Share{Rate: 1, Burst: 1}, Period: 2 * 366 * 86_400}, "refill period"},
		{"not exact", rule.Rule{Key: "k", Share: tokenbucket.Share{Rate: 1157, Burst: 2e6}, Period: 1000}, "refill 0.001157 cannot be kept exactly: at a capacity of 2000000 its step is 0.00001 credits per second"},
	} {
		err := test.r.Validate()
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.name, err, test.want)
		}
	}
}

// Compares Defaults with a search through all defaults.
func TestDefaults(t *testing.T) {
	word := rapid.StringMatching(`[ab/]{0,4}`)
	rapid.Check(t, func(t *rapid.T) {
		var d rule.Defaults
		all := map[string]rule.Rule{}
		for i := range rapid.IntRange(0, 12).Draw(t, "edits") {
			key := word.Draw(t, "prefix") + "*"
			if rapid.IntRange(0, 3).Draw(t, "delete") == 0 {
				d.Delete(key)
				delete(all, key)
				continue
			}
			r := rule.Rule{Key: key, Change: uint64(i)}
			d.Set(r)
			all[key] = r
		}
		key := word.Draw(t, "key")
		var want rule.Rule
		for _, r := range all {
			if p, _ := strings.CutSuffix(r.Key, "*"); strings.HasPrefix(key, p) && len(r.Key) > len(want.Key) {
				want = r
			}
		}
		testkit.MustEqual(t, d.For(key), want, "key %q", key)
	})
}

// Adding a default must not become slower with the number of defaults. The test took minutes once.
func TestManyDefaults(t *testing.T) {
	var d rule.Defaults
	const many = 100_000
	for i := range many {
		d.Set(rule.Rule{Key: fmt.Sprintf("tenant/%d/*", i)})
	}
	for i := range many - 1 {
		d.Delete(fmt.Sprintf("tenant/%d/*", i))
	}
	for _, key := range []string{"tenant/7/x", fmt.Sprintf("tenant/%d/x", many-1)} {
		testkit.Equal(t, d.For(key).Key != "", key != "tenant/7/x", "a default of %s", key)
	}
}

func TestPartition(t *testing.T) {
	// The check value of CRC-32/IEEE is 0xcbf43926.
	testkit.Equal(t, rule.Partition("123456789", 4096), 0xcbf43926%4096, "partition")
	testkit.Equal(t, rule.Partition([]byte("123456789"), 7), 0xcbf43926%7, "partition of 7")
	testkit.Equal(t, testing.AllocsPerRun(100, func() { rule.Partition(keyBytes, 4096) }), 0, "allocations")
}

// paperBucket is the paper's leaky bucket with refill (section II.C), written as in the paper: f(t) =
// C + (A-B)*t within [0, C], refilled by a tick. The bucket admits a request while the credit is
// greater than zero. The bucket differs from tokenbucket.Bucket in two ways: a fraction of a credit
// admits a whole request, so the credit falls below zero; and credits earned between ticks are not
// available until the tick.
type paperBucket struct {
	refill   float64 // A, credits per second
	capacity float64 // C, credits
	credit   float64
}

// tick refills for the time since the tick before.
func (b *paperBucket) tick(since time.Duration) {
	b.credit = min(b.capacity, b.credit+b.refill*since.Seconds())
}

// take admits a request and charges one credit if the credit is above zero.
func (b *paperBucket) take() bool {
	if b.credit <= 0 {
		return false
	}
	b.credit--
	return true
}

var keyBytes = []byte("tenant/acme/http")

// Compares the admissions of the paper's bucket with the bound that the rule names.
func TestPaperBucketGoesAboveItsRule(t *testing.T) {
	paper := paperBucket{refill: 10, capacity: 1, credit: 1}
	exact := tokenbucket.NewFull(tokenbucket.Share{Rate: 10_000, Burst: 1}, 0)
	var byPaper, byRule int
	const step = 10 * time.Millisecond // a tenth of the time that a credit takes
	for i := range 96 {
		if i > 0 {
			paper.tick(step)
		}
		if paper.take() {
			byPaper++
		}
		if ok, _ := exact.Admit(1, mono.Time(i)*mono.Time(step)); ok {
			byRule++
		}
	}
	if fmt.Sprint(byPaper, byRule) != "11 10" { // C + A*t = 1 + 9.5
		t.Errorf("in 950 ms the paper's bucket admits %d, the rule %d", byPaper, byRule)
	}
}
