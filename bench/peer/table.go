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

// column is a metric of a broker's runs.
type column struct {
	host.Column[load.Result]
	// flood and timed report whether the metric applies to scenarios without a rate and to
	// scenarios with a rate.
	flood, timed bool
	compared     order
}

// order defines which of two values is better.
type order int

const (
	uncompared order = iota // not compared
	lower
	higher
)

var columns = []column{
	{host.Figure("p50 ms", "%.3f", func(r load.Result) float64 { return r.P50 }), false, true, lower},
	{host.Figure("p99 ms", "%.3f", func(r load.Result) float64 { return r.P99 }), false, true, lower},
	{aggregated(host.Least, host.Figure("least p99", "%.3f", func(r load.Result) float64 { return r.P99 })), false, true, lower},
	{host.Figure("p99.9 ms", "%.3f", func(r load.Result) float64 { return r.P999 }), false, true, uncompared},
	{host.Figure("in/s", "%.0f", func(r load.Result) float64 { return r.InPerSecond }), true, false, higher},
	{host.Figure("out/s", "%.0f", func(r load.Result) float64 { return r.OutPerSecond }), true, false, higher},
	{host.Figure("CPU us/msg", "%.2f", func(r load.Result) float64 { return r.CPU }), true, true, lower},
	{host.Figure("load us/msg", "%.2f", func(r load.Result) float64 { return r.Load }), true, true, uncompared},
	{host.Figure("late p99", "%.3f", func(r load.Result) float64 { return r.Late }), false, true, uncompared},
	{aggregated(host.Largest, host.Figure("others %", "%.0f", func(r load.Result) float64 { return r.Others })), true, true, uncompared},
	{host.Figure("RSS MB", "%.1f", func(r load.Result) float64 { return r.RSS }), true, true, lower},
	{host.Figure("bytes/conn", "%.0f", func(r load.Result) float64 { return r.PerConn }), false, true, lower},
	{optionalColumn("mallocs/msg", "%.2f", func(r load.Result) *float64 { return r.Mallocs }), true, true, uncompared},
	{optionalColumn("GC cycles", "%.0f", func(r load.Result) *float64 { return r.Collections }), true, true, uncompared},
	{host.Figure("missing", "%.0f", func(r load.Result) float64 { return float64(r.Missing) }), true, true, uncompared},
}

// stormColumn is shown if the scenario has a storm.
var stormColumn = column{host.Figure("storm/s", "%.0f", func(r load.Result) float64 { return r.Storm }), true, true, uncompared}

// contractColumns are shown if the sender keeps a contract.
var contractColumns = slices.Concat(
	quantilesOf("access", func(r load.Result) *load.Quantiles { return r.Access }),
	quantilesOf("left", func(r load.Result) *load.Quantiles { return r.Left }),
)

func quantilesOf(what string, value func(load.Result) *load.Quantiles) (all []column) {
	for _, q := range []struct {
		name     string
		quantile func(*load.Quantiles) *float64
	}{
		{"p50", func(q *load.Quantiles) *float64 { return &q.P50 }}, {"p99", func(q *load.Quantiles) *float64 { return &q.P99 }},
		{"max", func(q *load.Quantiles) *float64 { return &q.Max }},
	} {
		all = append(all, column{optionalColumn(what+" "+q.name+" us", "%.1f", func(r load.Result) *float64 {
			if v := value(r); v != nil {
				return q.quantile(v)
			}
			return nil
		}), false, true, uncompared})
	}
	return all
}

// optionalColumn is a column for a metric that some brokers do not report.
func optionalColumn(title, format string, value func(load.Result) *float64) host.Column[load.Result] {
	return host.Column[load.Result]{Title: title, Format: format, Value: func(r load.Result) (float64, bool) {
		if v := value(r); v != nil {
			return *v, true
		}
		return 0, false
	}}
}

func aggregated(sum func(sorted []float64) float64, c host.Column[load.Result]) host.Column[load.Result] {
	c.Sum = sum
	return c
}

// shows reports whether a column applies to a scenario.
func (c column) shows(s load.Scenario) bool { return s.Rate > 0 && c.timed || s.Rate == 0 && c.flood }

// results are the successful runs, by scenario and broker.
type results map[[2]string][]load.Result

func group(runs []load.Result) results {
	all := results{}
	for _, r := range runs {
		if r.Error == "" {
			key := [2]string{r.Scenario, r.Peer}
			all[key] = append(all[key], r)
		}
	}
	return all
}

// ratio returns the ratio of two brokers' values, or false if a value is not known.
func (of results) ratio(c column, scenario, numerator, denominator string) (float64, bool) {
	v, ok1 := c.Figure(of[[2]string{scenario, numerator}])
	w, ok2 := c.Figure(of[[2]string{scenario, denominator}])
	if c.compared == uncompared || !ok1 || !ok2 || w <= 0 {
		return 0, false
	}
	return v / w, true
}

// writeTables writes a Markdown table for each scenario: the metrics of every broker, and
// the ratios of the first broker's metrics to the others'.
func writeTables(out io.Writer, list []load.Scenario, names []string, runs []load.Result) error {
	var b strings.Builder
	sound := group(runs)
	for _, s := range list {
		var measured, faults []string
		for _, name := range names {
			for _, r := range runs {
				if r.Scenario != s.Name || r.Peer != name {
					continue
				}
				if !slices.Contains(measured, name) {
					measured = append(measured, name)
				}
				if r.Error != "" {
					faults = append(faults, fmt.Sprintf("%s, round %d: %s", name, r.Round, r.Error))
				}
			}
		}
		if len(measured) == 0 {
			continue
		}
		offered := columns
		if s.Burst > 0 {
			offered = slices.Concat(columns, contractColumns)
		}
		if s.Storm > 0 {
			offered = slices.Concat(offered, []column{stormColumn})
		}
		offered = slices.DeleteFunc(slices.Clone(offered), func(c column) bool { return !c.shows(s) })
		var table host.Table[load.Result]
		for _, c := range offered {
			table = append(table, c.Column)
		}
		fmt.Fprintf(&b, "\n### %s\n\n%s; %d bytes.\n\n", s.Name, s.What, s.Size)
		table.Head(&b, "broker")
		for _, name := range measured {
			table.Row(&b, sound[[2]string{s.Name, name}], name)
		}
		for _, name := range measured[1:] {
			if measured[0] != names[0] {
				break
			}
			cells := []string{names[0] + " / " + name}
			for _, c := range offered {
				cell := "-"
				if v, ok := sound.ratio(c, s.Name, names[0], name); ok {
					cell = fmt.Sprintf("%.3g", v)
				}
				cells = append(cells, cell)
			}
			host.Row(&b, cells...)
		}
		for _, f := range faults {
			fmt.Fprintf(&b, "\n%s\n", f)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}
