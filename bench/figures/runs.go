package figures

import (
	"context"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// liveRuns is how often a live figure is measured.
const liveRuns = 5

// run makes the figure. Live figures are made several times, each time with another seed. Their rows
// and curves have means and standard deviations, and their CSV files have all runs.
func (f figure) run(ctx context.Context, o options, stderr io.Writer) (*work, error) {
	var runs []*work
	for i := range min(o.runs, liveRuns) {
		w := newHarness(ctx, o, f.name, stderr)
		w.seed += uint64(i)
		if err := f.make(w); err != nil || !f.live {
			return w.out, err
		}
		if runs = append(runs, w.out); len(w.out.rows) != len(runs[0].rows) || len(w.out.panels) != len(runs[0].panels) {
			return nil, fmt.Errorf("run %d has other rows or panels than the first run", i+1)
		}
	}
	return merge(runs), nil
}

// merge combines the runs of a figure. Requires: the runs have the same rows, panels and curves.
func merge(runs []*work) *work {
	all := runs[0]
	for i := range all.rows {
		over := func(cell func(row) string) string {
			texts := make([]string, len(runs))
			for j, w := range runs {
				texts[j] = cell(w.rows[i])
			}
			return overRuns(texts)
		}
		r := &all.rows[i]
		r.Simulated, r.Live, r.Note = over(func(r row) string { return r.Simulated }), over(func(r row) string { return r.Live }), over(func(r row) string { return r.Note })
	}
	for i := range all.panels {
		p, rows := &all.panels[i], [][]string(nil)
		for j, w := range runs {
			for _, cells := range w.panels[i].rows {
				rows = append(rows, append([]string{strconv.Itoa(j + 1)}, cells...))
			}
		}
		p.header, p.rows = append([]string{"run"}, p.header...), rows
		for s := range p.series {
			curve := &p.series[s]
			for at := range curve.y {
				var ys []float64
				for _, w := range runs {
					if other := w.panels[i].series[s].y; at < len(other) { // runs of a time series differ in length
						ys = append(ys, other[at])
					}
				}
				curve.y[at], curve.err[at] = spreadOf(ys).mean, spreadOf(ys).sd
			}
		}
	}
	return all
}

var decimal = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// overRuns combines texts. A number that differs becomes its mean ± standard deviation, as precise as the largest.
func overRuns(texts []string) string {
	words := func(text string) string { return decimal.ReplaceAllString(text, "") }
	if slices.ContainsFunc(texts, func(text string) bool { return words(text) != words(texts[0]) }) {
		return strings.Join(texts, "; or ")
	}
	i := -1
	return decimal.ReplaceAllStringFunc(texts[0], func(first string) string {
		i++
		largest, digits := 0.0, 0
		s := summarise(texts, func(text string) float64 {
			number := decimal.FindAllString(text, -1)[i]
			n, _ := strconv.ParseFloat(number, 64) // decimal matches numbers only
			if n >= largest {
				_, fraction, _ := strings.Cut(number, ".")
				largest, digits = n, len(fraction)
			}
			return n
		})
		if s.sd == 0 {
			return first
		}
		return s.text(digits)
	})
}
