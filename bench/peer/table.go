//go:build linux

package peer

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/srtm-io/srtm/bench/host"
	"github.com/srtm-io/srtm/tools/load"
)

// column is a figure as tables show it.
type column struct {
	title  string
	of     func(load.Result) (float64, bool) // false: not known
	format string
	// summary makes one figure of those of several rounds.
	summary func(sorted []float64) float64
	// flood and timed say for which scenarios it means something: those that
	// send as fast as it goes in, and those that have a rate.
	flood, timed bool
	compared     order
}

// order says which of two figures is the better one.
type order int

const (
	neither order = iota // they are not compared
	lower
	higher
)

var columns = []column{
	{"p50 ms", always(func(r load.Result) float64 { return r.P50 }), "%.3f", middle, false, true, lower},
	{"p99 ms", always(func(r load.Result) float64 { return r.P99 }), "%.3f", middle, false, true, lower},
	{"least p99", always(func(r load.Result) float64 { return r.P99 }), "%.3f", least, false, true, lower},
	{"p99.9 ms", always(func(r load.Result) float64 { return r.P999 }), "%.3f", middle, false, true, neither},
	{"in/s", always(func(r load.Result) float64 { return r.InPerSecond }), "%.0f", middle, true, false, higher},
	{"out/s", always(func(r load.Result) float64 { return r.OutPerSecond }), "%.0f", middle, true, false, higher},
	{"CPU us/msg", always(func(r load.Result) float64 { return r.CPU }), "%.2f", middle, true, true, lower},
	{"load us/msg", always(func(r load.Result) float64 { return r.Load }), "%.2f", middle, true, true, neither},
	{"late p99", always(func(r load.Result) float64 { return r.Late }), "%.3f", middle, false, true, neither},
	{"others %", always(func(r load.Result) float64 { return r.Others }), "%.0f", most, true, true, neither},
	{"RSS MB", always(func(r load.Result) float64 { return r.RSS }), "%.1f", middle, true, true, lower},
	{"bytes/conn", always(func(r load.Result) float64 { return r.PerConn }), "%.0f", middle, false, true, lower},
	{"mallocs/msg", maybe(func(r load.Result) *float64 { return r.Mallocs }), "%.2f", middle, true, true, neither},
	{"GC cycles", maybe(func(r load.Result) *float64 { return r.Collections }), "%.0f", middle, true, true, neither},
	{"missing", always(func(r load.Result) float64 { return float64(r.Missing) }), "%.0f", middle, true, true, neither},
}

// stormColumn is shown where there is a storm.
var stormColumn = column{"storm/s", always(func(r load.Result) float64 { return r.Storm }), "%.0f", middle, true, true, neither}

// contractColumns are shown where the sender keeps a contract.
var contractColumns = slices.Concat(
	quantilesOf("access", func(r load.Result) *load.Quantiles { return r.Access }),
	quantilesOf("left", func(r load.Result) *load.Quantiles { return r.Left }),
)

func quantilesOf(what string, of func(load.Result) *load.Quantiles) (all []column) {
	for _, q := range []struct {
		name string
		at   func(*load.Quantiles) *float64
	}{
		{"p50", func(q *load.Quantiles) *float64 { return &q.P50 }}, {"p99", func(q *load.Quantiles) *float64 { return &q.P99 }},
		{"max", func(q *load.Quantiles) *float64 { return &q.Max }},
	} {
		all = append(all, column{what + " " + q.name + " us", maybe(func(r load.Result) *float64 {
			if v := of(r); v != nil {
				return q.at(v)
			}
			return nil
		}), "%.1f", middle, false, true, neither})
	}
	return all
}

func always(of func(load.Result) float64) func(load.Result) (float64, bool) {
	return func(r load.Result) (float64, bool) { return of(r), true }
}

func maybe(of func(load.Result) *float64) func(load.Result) (float64, bool) {
	return func(r load.Result) (float64, bool) {
		if v := of(r); v != nil {
			return *v, true
		}
		return 0, false
	}
}

func middle(sorted []float64) float64 { return sorted[len(sorted)/2] }

// least is of the round that was least disturbed: what else a machine does only
// adds to a latency.
func least(sorted []float64) float64 { return sorted[0] }

func most(sorted []float64) float64 { return sorted[len(sorted)-1] }

// figure is of a broker's runs of a scenario; false if there is none.
func (c column) figure(runs []load.Result) (float64, bool) {
	var vs []float64
	for _, r := range runs {
		if v, ok := c.of(r); ok && r.Error == "" {
			vs = append(vs, v)
		}
	}
	if len(vs) == 0 {
		return 0, false
	}
	slices.Sort(vs)
	return c.summary(vs), true
}

// shows says whether a column means something for a scenario.
func (c column) shows(s load.Scenario) bool { return s.Rate > 0 && c.timed || s.Rate == 0 && c.flood }

// results are the runs by scenario and broker.
type results map[[2]string][]load.Result

func group(runs []load.Result) results {
	by := results{}
	for _, r := range runs {
		key := [2]string{r.Scenario, r.Peer}
		by[key] = append(by[key], r)
	}
	return by
}

// ratio is one broker's figure by another's; false if one of them is not known.
func (by results) ratio(c column, scenario, one, other string) (float64, bool) {
	v, ok1 := c.figure(by[[2]string{scenario, one}])
	w, ok2 := c.figure(by[[2]string{scenario, other}])
	if c.compared == neither || !ok1 || !ok2 || w <= 0 {
		return 0, false
	}
	return v / w, true
}

// writeTables writes a table in Markdown for each scenario: the figures of every
// broker's runs, and the first broker's as ratios to the others'.
func writeTables(out io.Writer, list []load.Scenario, names []string, runs []load.Result) error {
	var b strings.Builder
	by := group(runs)
	for _, s := range list {
		var there, faults []string
		for _, name := range names {
			if of := by[[2]string{s.Name, name}]; len(of) > 0 {
				there = append(there, name)
				for _, r := range of {
					if r.Error != "" {
						faults = append(faults, fmt.Sprintf("%s, round %d: %s", name, r.Round, r.Error))
					}
				}
			}
		}
		if len(there) == 0 {
			continue
		}
		var shown []column
		offered := columns
		if s.Burst > 0 {
			offered = slices.Concat(columns, contractColumns)
		}
		if s.Storm > 0 {
			offered = slices.Concat(offered, []column{stormColumn})
		}
		for _, c := range offered {
			if c.shows(s) {
				shown = append(shown, c)
			}
		}
		fmt.Fprintf(&b, "\n### %s\n\n%s; %d bytes.\n\n", s.Name, s.What, s.Size)
		row(&b, "broker", shown, func(c column) string { return c.title })
		row(&b, "---", shown, func(column) string { return "---" })
		for _, name := range there {
			row(&b, name, shown, func(c column) string {
				if v, ok := c.figure(by[[2]string{s.Name, name}]); ok {
					return fmt.Sprintf(c.format, v)
				}
				return "-"
			})
		}
		for _, name := range there {
			if there[0] != names[0] || name == names[0] {
				continue
			}
			row(&b, names[0]+" / "+name, shown, func(c column) string {
				if v, ok := by.ratio(c, s.Name, names[0], name); ok {
					return fmt.Sprintf("%.3g", v)
				}
				return "-"
			})
		}
		for _, f := range faults {
			fmt.Fprintf(&b, "\n%s\n", f)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func row(b *strings.Builder, head string, columns []column, of func(column) string) {
	cells := []string{head}
	for _, c := range columns {
		cells = append(cells, of(c))
	}
	host.Row(b, cells...)
}
