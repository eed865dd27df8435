package hook

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Segments that arrived before a step of the wall clock, and that later reads take from the socket,
// must not seem older than they are.
func TestTimesFromBeforeAStepAreNotUsed(t *testing.T) {
	const (
		start = mono.Time(time.Hour)
		wall  = mono.Wall(1000 * time.Hour) // at start
	)
	for _, step := range []time.Duration{5 * time.Minute, time.Second, -time.Second, -5 * time.Minute} {
		c := clocks{offset: mono.Time(wall) - start}
		stepped, second := start.Add(10*time.Second), time.Second
		reads := []struct {
			arrived, read mono.Time
			want          bool
		}{
			{start.Add(second), start.Add(second), true},
			{start.Add(5 * second), start.Add(11 * second), false},
			{start.Add(6 * second), start.Add(12 * second), false},
			{start.Add(7 * second), start.Add(13 * second), false},
			{start.Add(20 * second), start.Add(20 * second), true},
		}
		for i, r := range reads {
			stamp, now := wall+mono.Wall(r.arrived-start), wall+mono.Wall(r.read-start)
			if r.arrived > stepped {
				stamp += mono.Wall(step)
			}
			if r.read > stepped {
				now += mono.Wall(step)
			}
			at, ok := c.convert(stamp, r.read, now)
			if ok && at.Before(r.arrived) {
				t.Errorf("step %v, read %d: the segment seems %v older than it is", step, i, r.arrived.Sub(at))
			}
			if usable := ok && !r.read.Before(at); r.want && !usable || step > 0 && usable != r.want {
				t.Errorf("step %v, read %d: usable: %v, want %v", step, i, usable, r.want)
			}
		}
	}
}

func TestClocksAreReadAgainAfterAPause(t *testing.T) {
	now := mono.Time(time.Hour)
	const offset = mono.Wall(1000 * time.Hour)
	pauses := []time.Duration{time.Second, 2 * time.Millisecond, 0}
	read, wall := together(func() mono.Time { return now }, func() mono.Wall {
		now, pauses = now.Add(pauses[0]), pauses[1:]
		return mono.Wall(now) + offset
	})
	if len(pauses) != 0 || mono.Wall(read)+offset != wall {
		t.Errorf("%d pauses are left, the clocks are %v apart", len(pauses), time.Duration(wall-offset-mono.Wall(read)))
	}
}
