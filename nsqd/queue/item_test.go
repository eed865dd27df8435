package queue

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// Fresh messages and items leave in the order in which they entered.
func TestReadyMessagesKeepTheirOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var s items
		var want []*Message
		var outside []*item
		for n := range rapid.IntRange(0, 100).Draw(rt, "steps") {
			switch step := rapid.IntRange(0, 3).Draw(rt, "step"); {
			case step == 0 && len(want) > 0:
				it := s.pop()
				if it.msg != want[0] {
					rt.Fatalf("message %d comes, want %d", number(it.msg), number(want[0]))
				}
				want, outside = want[1:], append(outside, it)
			case step == 1 && len(outside) > 0:
				it := outside[0]
				outside = outside[1:]
				s.ready.push(it)
				want = append(want, it.msg)
			default:
				m := message(n, 0)
				s.enter(0, m)
				want = append(want, m)
			}
			var all []*Message
			for m := range s.ready.all {
				all = append(all, m)
			}
			if !slices.Equal(all, want) || s.ready.Len() != len(want) {
				rt.Fatalf("%d messages, want %d", len(all), len(want))
			}
			if len(want) > 0 {
				if m, _ := s.ready.front(); m != want[0] {
					rt.Fatalf("the front is message %d, want %d", number(m), number(want[0]))
				}
			}
		}
	})
}
