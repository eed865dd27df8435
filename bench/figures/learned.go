package figures

import (
	"fmt"
	"strconv"

	"github.com/srtm-io/srtm/tools/sim/scenario"
)

// keysOf lists the kinds of correlation keys for the placement.
var keysOf = []string{scenario.Declared, scenario.Learned, scenario.Blind}

// learnFrom is the part of each recording from which the groups are learned, in seconds.
// The part precedes the replayed part.
var learnFrom = map[string][2]float64{"detectors": {0, 3600}, "pedestrians": {39_600, 50_400}}

// learnedOver is the number of brokers for the repetition of figures 9 to 11: the largest
// number in these figures. Every group size is a multiple of 5, so no remainder affects the
// result.
const learnedOver = 5

// byKeys simulates a topic at every x with declared keys, learned keys, and without keys.
func (w *harness) byKeys(xs []float64, at func(x float64) scenario.Scenario) ([][]*outcome, error) {
	var curves []curve
	for _, keys := range keysOf {
		curves = append(curves, func(x float64, _ []*outcome) (*outcome, error) {
			s := at(x)
			s.Topics[0].Keys = keys
			return w.repeat(s)
		})
	}
	return w.points(xs, curves...)
}

// learned repeats figures 9 to 11 and the recorded traffic without declared keys.
func learned(w *harness) error {
	long := w.steady()
	within := func(o *outcome) string { return o.p99.ms() + " (" + o.access.ms() + ")" }
	add := func(id, title, x string, xs []float64, got [][]*outcome) {
		p := latencies("learned-"+id, title, x, "x", "keys")
		var lines []line
		for j, keys := range keysOf {
			lines = append(lines, line{name: keys, of: j, y: p99Of, label: j == 0, lead: named(keys)})
		}
		w.out.plot(p.fill(xs, 1, got, lines...))
		for i := range xs {
			o := got[i]
			w.out.tell(row{
				Figure: "learned: " + id, Quantity: fmt.Sprintf("%s %s: p99 (access) declared, learned, blind", x, number(xs[i])),
				Simulated: within(o[0]) + ", " + within(o[1]) + ", " + within(o[2]),
				Note:      "k = " + strconv.Itoa(o[0].k),
			})
		}
	}
	for _, c := range synchronised {
		for _, f := range []struct {
			id, title, x string
			xs           []float64
			size, noise  func(x float64) float64
		}{
			{"9" + c.panel, "groups of one instant", "group size", groupSizes, same, always(0)},
			{"11" + c.panel, "groups of 25", "noise, ms", noises, always(25), same},
		} {
			got, err := long.byKeys(f.xs, func(x float64) scenario.Scenario {
				return long.scene(grouped(c.process, f.size(x), f.noise(x), "", learnedOver))
			})
			if err != nil {
				return err
			}
			add(f.id, fmt.Sprintf("Learned groups: %s, %s", c.process, f.title), f.x, f.xs, got)
		}
	}
	half := *w // the results depend on the assignment of publishers, so several runs are needed
	half.runs = max(1, w.runs/2)
	for _, t := range recorded {
		file, err := w.path(t)
		if err != nil {
			w.out.tell(row{Figure: "learned: " + t.id, Quantity: t.title, Note: "not made: " + err.Error()})
			continue
		}
		xs := []float64{2, 4, 6}
		got, err := half.byKeys(xs, func(k float64) scenario.Scenario {
			s := half.split(t, file, "", int(k))
			from := learnFrom[t.id]
			s.Topics[0].Learning = scenario.Learning{From: from[0], To: from[1]}
			return s
		})
		if err != nil {
			return err
		}
		add(t.id, "Learned from earlier traffic: "+t.title, "brokers", xs, got)
	}
	return nil
}

func same(x float64) float64                 { return x }
func always(y float64) func(float64) float64 { return func(float64) float64 { return y } }
