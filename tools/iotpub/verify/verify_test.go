package verify_test

import (
	"maps"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/verify"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type message = verify.Message

func account(accepted, delivered []message) (*verify.Set, *verify.Deliveries) {
	a, d := verify.NewSet(3), verify.NewDeliveries(3)
	for _, m := range accepted {
		a.Add(m.Source, m.Seq)
	}
	for _, m := range delivered {
		d.Deliver(m.Source, m.Seq)
	}
	return a, d
}

// The slow, obvious version uses maps of counts.
func TestCompareAgainstMaps(t *testing.T) {
	gen := rapid.SliceOf(rapid.Custom(func(t *rapid.T) message {
		return message{rapid.Uint32Range(0, 4).Draw(t, "source"), rapid.Uint32Range(0, 200).Draw(t, "seq")}
	}))
	rapid.Check(t, func(t *rapid.T) {
		accepted, delivered := gen.Draw(t, "accepted"), gen.Draw(t, "delivered")
		a, d := account(accepted, delivered)

		counts, oks := map[message]uint64{}, map[message]bool{}
		var want verify.Result
		for _, m := range delivered {
			if m.Source >= 3 {
				want.Foreign++
				continue
			}
			counts[m]++
		}
		for _, m := range accepted {
			if m.Source < 3 {
				oks[m] = true
			}
		}
		var missing []message
		for m := range oks {
			if counts[m] == 0 {
				want.Lost++
				missing = append(missing, m)
			}
		}
		for m, n := range counts {
			want.Duplicated += n - 1
			if !oks[m] {
				want.Unaccepted++
			}
		}
		want.Accepted, want.Delivered = uint64(len(oks)), uint64(len(counts))
		testkit.MustEqual(t, verify.Compare(a, d), want)
		slices.SortFunc(missing, func(x, y message) int {
			if x.Source != y.Source {
				return int(x.Source) - int(y.Source)
			}
			return int(x.Seq) - int(y.Seq)
		})
		limit := rapid.IntRange(0, 10).Draw(t, "limit")
		if got, want := verify.Missing(a, d, limit), missing[:min(limit, len(missing))]; !slices.Equal(got, want) {
			t.Fatalf("missing %v, want %v", got, want)
		}
	})
}

func TestMergeIsUnion(t *testing.T) {
	gen := rapid.SliceOf(rapid.Custom(func(t *rapid.T) message {
		return message{rapid.Uint32Range(0, 2).Draw(t, "source"), rapid.Uint32Range(0, 300).Draw(t, "seq")}
	}))
	rapid.Check(t, func(t *rapid.T) {
		x, y := gen.Draw(t, "x"), gen.Draw(t, "y")
		a, _ := account(x, nil)
		b, _ := account(y, nil)
		before := b.Len()
		a.Merge(b)
		union := map[message]bool{}
		for _, m := range slices.Concat(x, y) {
			union[m] = true
		}
		if a.Len() != uint64(len(union)) || b.Len() != before {
			t.Fatalf("union of %d, want %d", a.Len(), len(union))
		}
		for m := range maps.Keys(union) {
			if !a.Has(m.Source, m.Seq) {
				t.Fatalf("%v is not in the union", m)
			}
		}
	})
}

func TestAddOutcomes(t *testing.T) {
	s := verify.NewSet(2)
	got := []verify.Outcome{
		s.Add(0, 63), s.Add(0, 63), s.Add(0, 64), s.Add(1, 63), s.Add(2, 0), s.Add(0, verify.MaxSeq), s.Add(1, verify.MaxSeq-1),
	}
	want := []verify.Outcome{
		verify.Added, verify.Present, verify.Added, verify.Added, verify.Foreign, verify.Foreign, verify.Added,
	}
	if !reflect.DeepEqual(got, want) || s.Len() != 4 {
		t.Errorf("outcomes %v and %d messages, want %v and 4", got, s.Len(), want)
	}
	if s.Has(0, 0) || s.Has(0, 1<<20) || s.Has(2, 0) {
		t.Error("the set has what was never added")
	}
}
