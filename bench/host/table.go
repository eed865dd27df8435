package host

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// Column is what a table shows of a subject's rounds: one figure of all rounds, or a text.
type Column[R any] struct {
	Title, Format string
	Of            func(R) (figure float64, known bool)
	Sum           func(sorted []float64) float64 // one figure of several; nil: Middle
	Text          func(rounds []R) string        // instead of a figure; nil: none
}

// Figure is a column of medians.
func Figure[R any](title, format string, of func(R) float64) Column[R] {
	return Column[R]{Title: title, Format: format, Of: func(r R) (float64, bool) { return of(r), true }}
}

// Middle is the median.
func Middle(sorted []float64) float64 { return sorted[len(sorted)/2] }

// Least is the figure of the round that was disturbed least: what else a machine does only
// adds to a latency.
func Least(sorted []float64) float64 { return sorted[0] }

// Most is the largest figure.
func Most(sorted []float64) float64 { return sorted[len(sorted)-1] }

// Figure is the column's figure of all rounds. It is not known if no round has one.
func (c Column[R]) Figure(rounds []R) (figure float64, known bool) {
	var all []float64
	for _, r := range rounds {
		if v, ok := c.Of(r); ok {
			all = append(all, v)
		}
	}
	if len(all) == 0 {
		return 0, false
	}
	slices.Sort(all)
	if c.Sum == nil {
		return Middle(all), true
	}
	return c.Sum(all), true
}

// Cell is the column's cell in the row of a subject: "-" if the figure is not known.
func (c Column[R]) Cell(rounds []R) string {
	if c.Text != nil {
		return c.Text(rounds)
	}
	if v, known := c.Figure(rounds); known {
		return fmt.Sprintf(c.Format, v)
	}
	return "-"
}

// Table are the columns of a table in Markdown.
type Table[R any] []Column[R]

// Head writes the head. The titles in lead stand before the titles of the columns.
func (t Table[R]) Head(w io.Writer, lead ...string) {
	for _, c := range t {
		lead = append(lead, c.Title)
	}
	Head(w, lead...)
}

// Row writes the row of a subject, after the cells in lead.
func (t Table[R]) Row(w io.Writer, rounds []R, lead ...string) {
	for _, c := range t {
		lead = append(lead, c.Cell(rounds))
	}
	Row(w, lead...)
}

// Write writes the whole table, a row for each subject that has rounds.
func (t Table[R]) Write(w io.Writer, subjects []Subject[R], by map[string][]R) {
	t.Head(w, "")
	for _, s := range subjects {
		if rounds := by[s.Name]; len(rounds) > 0 {
			t.Row(w, rounds, s.Name)
		}
	}
}

// Head writes the head of a table in Markdown.
func Head(w io.Writer, titles ...string) {
	Row(w, titles...)
	Row(w, slices.Repeat([]string{"---"}, len(titles))...)
}

// Rowf writes a row of a table in Markdown. Tabs in the format stand between its cells.
func Rowf(w io.Writer, format string, args ...any) {
	Row(w, strings.Split(fmt.Sprintf(format, args...), "\t")...)
}

// Row writes a row of a table in Markdown.
func Row(w io.Writer, cells ...string) {
	fmt.Fprintln(w, "| "+strings.Join(cells, " | ")+" |")
}
