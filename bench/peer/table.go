//go:build linux

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// column is a figure as tables show it.
type column struct {
	title  string
	of     func(run) (float64, bool) // false: not known
	format string
	// summary makes one figure of those of several rounds.
	summary func(sorted []float64) float64
	// flood and timed say for which scenarios it means something: those that
	// send as fast as it goes in, and those that have a rate.
	flood, timed bool
	ratio        bool // is compared
}

var columns = []column{
	{"p50 ms", always(func(r run) float64 { return r.P50 }), "%.3f", middle, false, true, true},
	{"p99 ms", always(func(r run) float64 { return r.P99 }), "%.3f", middle, false, true, true},
	{"least p99", always(func(r run) float64 { return r.P99 }), "%.3f", least, false, true, true},
	{"p99.9 ms", always(func(r run) float64 { return r.P999 }), "%.3f", middle, false, true, false},
	{"in/s", always(func(r run) float64 { return r.InPerSecond }), "%.0f", middle, true, false, true},
	{"out/s", always(func(r run) float64 { return r.OutPerSecond }), "%.0f", middle, true, false, true},
	{"CPU us/msg", always(func(r run) float64 { return r.CPU }), "%.2f", middle, true, true, true},
	{"load us/msg", always(func(r run) float64 { return r.Load }), "%.2f", middle, true, true, false},
	{"late p99", always(func(r run) float64 { return r.Late }), "%.3f", middle, false, true, false},
	{"others %", always(func(r run) float64 { return r.Others }), "%.0f", most, true, true, false},
	{"RSS MB", always(func(r run) float64 { return r.RSS }), "%.1f", middle, true, true, true},
	{"bytes/conn", always(func(r run) float64 { return r.PerConn }), "%.0f", middle, false, true, true},
	{"mallocs/msg", maybe(func(r run) *float64 { return r.Mallocs }), "%.2f", middle, true, true, false},
	{"GC cycles", maybe(func(r run) *float64 { return r.Collections }), "%.0f", middle, true, true, false},
	{"missing", always(func(r run) float64 { return float64(r.Missing) }), "%.0f", middle, true, true, false},
}

func always(of func(run) float64) func(run) (float64, bool) {
	return func(r run) (float64, bool) { return of(r), true }
}

func maybe(of func(run) *float64) func(run) (float64, bool) {
	return func(r run) (float64, bool) {
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
func (c column) figure(runs []run) (float64, bool) {
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

// writeTables writes two tables in Markdown for each scenario: the medians of
// every broker's runs, and the first broker's as ratios to the others'.
func writeTables(out io.Writer, list []scenario, names []string, runs []run) error {
	var b strings.Builder
	for _, s := range list {
		by := map[string][]run{}
		var faults []string
		for _, r := range runs {
			if r.Scenario == s.name {
				by[r.Peer] = append(by[r.Peer], r)
				if r.Error != "" {
					faults = append(faults, fmt.Sprintf("%s, round %d: %s", r.Peer, r.Round, r.Error))
				}
			}
		}
		if len(by) == 0 {
			continue
		}
		var shown []column
		for _, c := range columns {
			if s.rate > 0 && c.timed || s.rate == 0 && c.flood {
				shown = append(shown, c)
			}
		}
		fmt.Fprintf(&b, "\n%s: %s; %d bytes\n\n", s.name, s.what, s.size)
		row(&b, "broker", shown, func(c column) string { return c.title })
		row(&b, "---", shown, func(column) string { return "---" })
		for _, name := range names {
			if len(by[name]) == 0 {
				continue
			}
			row(&b, name, shown, func(c column) string {
				if v, ok := c.figure(by[name]); ok {
					return fmt.Sprintf(c.format, v)
				}
				return "-"
			})
		}
		first := by[names[0]]
		for _, name := range names[1:] {
			if len(by[name]) == 0 || len(first) == 0 {
				continue
			}
			row(&b, names[0]+" / "+name, shown, func(c column) string {
				v, ok1 := c.figure(first)
				w, ok2 := c.figure(by[name])
				if !c.ratio || !ok1 || !ok2 || w <= 0 {
					return "-"
				}
				return fmt.Sprintf("%.3g", v/w)
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
	fmt.Fprintf(b, "| %s |", head)
	for _, c := range columns {
		fmt.Fprintf(b, " %s |", of(c))
	}
	b.WriteString("\n")
}
