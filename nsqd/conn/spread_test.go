package conn

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// spreadWorld is a model of a machine for the spreader: connections bring work, loops do the work that fits into a
// processor, and the spreader's decisions are carried out.
type spreadWorld struct {
	s     spreader
	work  []float64 // per connection, in processors
	loop  []int     // per connection
	loops int
	cpus  float64
	other float64 // processors that others keep busy
	lock  bool    // all work holds one lock
	noise float64 // error of the observed idle processors: added in one look, subtracted in the next
}

func (w *spreadWorld) look() change {
	loops := make([]loopLoad, w.loops)
	for c, l := range w.loop {
		loops[l].busy += w.work[c]
		loops[l].largest = max(loops[l].largest, w.work[c])
		loops[l].connections++
	}
	used := w.other
	for i := range loops {
		if loops[i].busy > 0 {
			loops[i].largest /= loops[i].busy
		}
		loops[i].busy = min(loops[i].busy, 1)
		loops[i].work = loops[i].busy
		if w.lock && w.loops > 1 { // the loops wait for each other
			loops[i].work = 0.65 / float64(w.loops)
		}
		used += loops[i].busy
	}
	w.noise = -w.noise
	c := w.s.look(loops, max(0, w.cpus-used+w.noise))
	switch c.kind {
	case startLoop:
		w.loops++
	case moveWork:
		left := 0.
		for i, l := range w.loop {
			if l == c.from {
				left += w.work[i]
			}
		}
		left *= c.share
		for i, l := range w.loop {
			if l == c.from && w.work[i] > 0 && w.work[i] <= left {
				w.loop[i], left = c.to, left-w.work[i]
			}
		}
	case endLoop:
		last := w.loops - 1
		for i, l := range w.loop {
			if l == c.from {
				w.loop[i] = c.to
			}
		}
		for i, l := range w.loop { // the last loop takes the number of the ended loop
			if l == last {
				w.loop[i] = c.from
			}
		}
		w.loops--
	}
	return c
}

func TestLoopsFollowTheLoad(t *testing.T) {
	w := &spreadWorld{s: spreader{min: 1, max: 4}, loops: 1, cpus: 8}
	for range 100 {
		w.work, w.loop = append(w.work, 0.005), append(w.loop, 0)
	}
	settle := func(total float64, want int) {
		t.Helper()
		for i := range w.work {
			w.work[i] = total / float64(len(w.work))
		}
		for range 400 {
			w.look()
		}
		if w.loops != want {
			t.Errorf("%v processors of work: %d loops, want %d", total, w.loops, want)
		}
	}
	settle(0.5, 1)
	settle(1.2, 2)
	settle(1.0, 2) // between the bounds nothing changes
	settle(2.9, 4)
	settle(5.0, 4) // no more than the maximum
	settle(0.3, 1)
}

func TestNoLoopIsStartedInVain(t *testing.T) {
	for name, w := range map[string]*spreadWorld{
		"no processor to spare": {work: []float64{0.5, 0.5}, cpus: 2, other: 1},
		"a third of one":        {work: []float64{0.42, 0.42}, cpus: 2, other: 0.84, noise: 0.4},
		"one connection":        {work: []float64{1}, cpus: 8},
		"one and idle ones":     {work: []float64{0.9, 0, 0, 0, 0.05}, cpus: 8},
	} {
		w.s, w.loops, w.loop = spreader{min: 1, max: 4}, 1, make([]int, len(w.work))
		for range 1000 {
			if c := w.look(); c.kind != noChange {
				t.Errorf("%s: %+v", name, c)
				break
			}
		}
	}
}

// Loops that block each other do less work than one loop. The spreader detects the loss and does not try another loop
// again soon.
func TestALoopThatIsWorthNothingEnds(t *testing.T) {
	w := &spreadWorld{s: spreader{min: 1, max: 4}, loops: 1, cpus: 8, lock: true}
	for range 20 {
		w.work, w.loop = append(w.work, 0.1), append(w.loop, 0)
	}
	started, more := 0, 0
	for range 2 * holdLooks {
		if w.look().kind == startLoop {
			started++
		}
		if w.loops > 1 {
			more++
		}
	}
	if started < 1 || started > 2 || more > 2*(clearLooks+settleLooks+1) || w.loops != 1 {
		t.Errorf("%d were started in two minutes, there were more for %d looks, and %d in the end", started, more, w.loops)
	}
}

// For any constant load the spreader comes to rest: connections do not move back and forth.
func TestLoopsComeToRest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &spreadWorld{s: spreader{min: rapid.IntRange(1, 3).Draw(t, "min"), max: rapid.IntRange(3, 8).Draw(t, "max")}, cpus: float64(rapid.IntRange(1, 64).Draw(t, "cpus"))}
		w.loops = w.s.min
		w.other = w.cpus * rapid.Float64Range(0, 1).Draw(t, "others")
		w.work = rapid.SliceOfN(rapid.Float64Range(0, 1.2), 1, 60).Draw(t, "work")
		w.loop = make([]int, len(w.work))
		for range 2000 {
			w.look()
			if w.loops < w.s.min || w.loops > w.s.max {
				t.Fatalf("%d loops", w.loops)
			}
		}
		at, n := slices.Clone(w.loop), w.loops
		for range 300 {
			if c := w.look(); w.loops != n || !slices.Equal(w.loop, at) {
				t.Fatalf("after 2,000 looks still %+v of %d loops", c, w.loops)
			}
		}
	})
}
