package table_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/testkit"
)

// Compares a window with a map that forgets nothing.
func TestWindow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w table.Window[int]
		type question struct {
			answered bool
			answer   int
		}
		begun := map[uint64]question{} // questions that were begun and not cancelled
		next, newest := uint64(rapid.IntRange(0, 3).Draw(t, "second"))<<32, uint64(0)
		for i := range rapid.IntRange(1, 200).Draw(t, "steps") {
			number := next
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0: // some are lost
				next += rapid.Uint64Range(1, 2*table.WindowSize).Draw(t, "skip")
				number = next
			case 1: // the client restarts
				next = (next>>32 + 1) << 32
				number = next
			case 2, 3, 4, 5: // sent again, or late
				number -= min(number, rapid.Uint64Range(0, 300).Draw(t, "back"))
			case 6:
				number -= min(number, rapid.Uint64Range(0, 3*table.WindowSize).Draw(t, "far back"))
			}
			next = max(next, number+1)
			standing, answer := w.Begin(number)
			was, known := begun[number]
			want := table.Fresh
			switch {
			case newest >= table.WindowSize && number <= newest-table.WindowSize:
				want = table.Old
			case known && was.answered:
				want = table.Answered
			case known:
				want = table.Pending
			}
			if standing != want || standing == table.Answered && answer != was.answer {
				t.Fatalf("number %d, newest %d: %d %d, want %d %d", number, newest, standing, answer, want, was.answer)
			}
			if standing != table.Fresh {
				continue
			}
			newest = max(newest, number)
			begun[number] = question{}
			switch rapid.IntRange(0, 3).Draw(t, "end") {
			case 0: // later, or never
			case 1:
				w.Cancel(number)
				delete(begun, number)
			default:
				w.End(number, i)
				begun[number] = question{answered: true, answer: i}
			}
		}
	})
}

func TestWindowsOfLittleUseAreSmall(t *testing.T) {
	testkit.Equal(t, testing.AllocsPerRun(1, func() {
		var w table.Window[uint64]
		for i := range uint64(60) {
			w.Begin(i)
			w.End(i, i)
		}
	}), 1, "allocations for 60 questions")
}
