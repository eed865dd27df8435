package host

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// Column is a column of a table: one number computed from a subject's rounds, or a text.
type Column[R any] struct {
	Title, Format string
	Value         func(R) (figure float64, known bool)
	Sum           func(sorted []float64) float64 // combines the rounds; nil: Middle
	Text          func(rounds []R) string        // text in place of a number; may be nil
}

// Figure is a column of medians.
func Figure[R any](title, format string, value func(R) float64) Column[R] {
	return Column[R]{Title: title, Format: format, Value: func(r R) (float64, bool) { return value(r), true }}
}

// Middle returns the median.
func Middle(sorted []float64) float64 { return sorted[len(sorted)/2] }

// Least returns the minimum: the least disturbed round, because disturbances only increase a latency.
func Least(sorted []float64) float64 { return sorted[0] }

// Largest returns the maximum.
func Largest(sorted []float64) float64 { return sorted[len(sorted)-1] }

// Figure returns the column's number over all rounds. known is false if no round has the
// number.
func (c Column[R]) Figure(rounds []R) (figure float64, known bool) {
	var all []float64
	for _, r := range rounds {
		if v, ok := c.Value(r); ok {
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

// Cell returns the column's cell for a subject, or "-" if the number is not known.
func (c Column[R]) Cell(rounds []R) string {
	if c.Text != nil {
		return c.Text(rounds)
	}
	if v, known := c.Figure(rounds); known {
		return fmt.Sprintf(c.Format, v)
	}
	return "-"
}

// Table is a list of columns of a Markdown table.
type Table[R any] []Column[R]

// Head writes the head: the titles in lead, then the titles of the columns.
func (t Table[R]) Head(w io.Writer, lead ...string) {
	for _, c := range t {
		lead = append(lead, c.Title)
	}
	Head(w, lead...)
}

// Row writes a subject's row, after the cells in lead.
func (t Table[R]) Row(w io.Writer, rounds []R, lead ...string) {
	for _, c := range t {
		lead = append(lead, c.Cell(rounds))
	}
	Row(w, lead...)
}

// Write writes the whole table, with a row for each subject that has rounds.
func (t Table[R]) Write(w io.Writer, subjects []Subject[R], results map[string][]R) {
	t.Head(w, "")
	for _, s := range subjects {
		if rounds := results[s.Name]; len(rounds) > 0 {
			t.Row(w, rounds, s.Name)
		}
	}
}

// Head writes the head of a Markdown table.
func Head(w io.Writer, titles ...string) {
	Row(w, titles...)
	Row(w, slices.Repeat([]string{"---"}, len(titles))...)
}

// Rowf writes a row of a Markdown table. Tabs in the format separate cells.
func Rowf(w io.Writer, format string, args ...any) {
	Row(w, strings.Split(fmt.Sprintf(format, args...), "\t")...)
}

// Row writes a row of a Markdown table.
func Row(w io.Writer, cells ...string) {
	fmt.Fprintln(w, "| "+strings.Join(cells, " | ")+" |")
}
