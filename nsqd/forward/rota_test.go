package forward

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
)

func sum(of []int) (all int) {
	for _, n := range of {
		all += n
	}
	return all
}

func TestDivisionOfReady(t *testing.T) {
	for name, is := range map[string]struct {
		ready, turn int
		held, want  []int
	}{
		"no broker":                       {5, 0, nil, []int{}},
		"one broker":                      {5, 3, []int{9}, []int{5}},
		"evenly":                          {6, 1, []int{0, 0, 0}, []int{2, 2, 2}},
		"a remainder":                     {7, 1, []int{0, 0, 0}, []int{2, 3, 2}},
		"paused":                          {0, 1, []int{1, 0, 0}, []int{0, 0, 0}},
		"one credit":                      {1, 2, []int{0, 0, 0}, []int{0, 0, 1}},
		"two credits, around the end":     {2, 2, []int{0, 0, 0}, []int{1, 0, 1}},
		"its own message":                 {1, 2, []int{0, 0, 1}, []int{0, 0, 1}},
		"a message of the broker before":  {1, 2, []int{0, 1, 0}, []int{0, 0, 0}},
		"of another broker, and its own":  {2, 1, []int{1, 0, 1}, []int{0, 0, 1}},
		"more messages than there may be": {2, 0, []int{0, 0, 5}, []int{0, 0, 0}},
	} {
		r := rota{first: is.turn}
		if got := r.divide(is.ready, is.held); !slices.Equal(got, is.want) {
			t.Errorf("%s: %v, want %v", name, got, is.want)
		}
	}
}

func TestDivisionConservesReady(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		held := rapid.SliceOfN(rapid.IntRange(0, 3), 1, 9).Draw(t, "held")
		ready := rapid.IntRange(0, 30).Draw(t, "ready")
		r := rota{first: rapid.IntRange(0, 20).Draw(t, "turn")}
		parts := r.divide(ready, held)
		most := 0
		for i, part := range parts {
			most += max(part, held[i])
		}
		switch {
		case sum(held) == 0 && sum(parts) != ready, ready >= len(held) && sum(parts) != ready:
			t.Errorf("%v are not %d", parts, ready)
		case sum(parts) > ready:
			t.Errorf("%v are more than %d", parts, ready)
		case slices.Max(parts)-slices.Min(parts) > 1:
			t.Errorf("%v are uneven", parts)
		case ready < len(held) && slices.Max(held) <= 1 && most > max(ready, sum(held)):
			t.Errorf("%v beside %v held: the consumer may get %d, which is more than %d", parts, held, most, ready)
		}
	})
}

// For any deliveries, each broker has credit again within a bounded number of passes.
func TestCreditComesToEveryBroker(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		brokers := rapid.IntRange(2, 9).Draw(t, "brokers")
		ready := rapid.IntRange(1, brokers-1).Draw(t, "ready")
		r, since := rota{}, make([]int, brokers)
		for range 200 {
			parts := r.divide(ready, make([]int, brokers))
			came := make([]int, brokers)
			for i, part := range parts {
				if since[i]++; part > 0 {
					since[i] = 0
					came[i] = rapid.IntRange(0, 2).Draw(t, "came")
				}
			}
			if slices.Max(since) > maxStay*brokers {
				t.Fatalf("passes since each had credit: %v", since)
			}
			if pauses := r.pass(came); pauses < 1 || pauses > maxPause {
				t.Fatalf("a pause of %d", pauses)
			}
		}
	})
}

func TestCreditStaysWhereMessagesAre(t *testing.T) {
	r := rota{}
	for range maxStay - 1 {
		testkit.Equal(t, r.pass([]int{1, 0, 0}), 1)
		testkit.Equal(t, r.first, 0)
	}
	r.pass([]int{1, 0, 0})
	testkit.Equal(t, r.first, 1, "after its time")
	r.pass([]int{0, 0, 0})
	testkit.Equal(t, r.first, 2, "without a message")
	testkit.Equal(t, r.pass([]int{0, 0, 0}), 1)
	testkit.Equal(t, r.pass([]int{0, 0, 0}), 2, "the pause after a round without a message")
}
