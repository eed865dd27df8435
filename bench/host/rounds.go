package host

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Alternate measures every subject once a round, each round beginning with another, so
// that what disturbs the machine for a while disturbs all alike. It returns what was
// measured by subject, in the order of the rounds.
func Alternate[S, R any](ctx context.Context, rounds int, subjects []S, measure func(s S, round int) (R, error)) ([][]R, error) {
	got := make([][]R, len(subjects))
	for round := range rounds {
		for i := range subjects {
			at := (i + round) % len(subjects)
			r, err := measure(subjects[at], round)
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return nil, fmt.Errorf("round %d: %w", round+1, err)
			}
			got[at] = append(got[at], r)
		}
	}
	return got, nil
}

// Median is that of a figure of several rounds.
//
// Requires: there is a round.
func Median[R any, F cmp.Ordered](rounds []R, of func(R) F) F {
	figures := make([]F, len(rounds))
	for i, r := range rounds {
		figures[i] = of(r)
	}
	slices.Sort(figures)
	return figures[len(figures)/2]
}

// Column is what a table shows of a subject's rounds.
type Column[R any] struct {
	Title string
	Cell  func(rounds []R) string
}

// Figure is a column of medians.
func Figure[R any](title, format string, of func(R) float64) Column[R] {
	return Column[R]{title, func(rounds []R) string { return fmt.Sprintf(format, Median(rounds, of)) }}
}

// Table is a table in Markdown.
type Table[R any] []Column[R]

// Head writes the head; lead are the titles before those of the columns.
func (t Table[R]) Head(w io.Writer, lead ...string) {
	for _, c := range t {
		lead = append(lead, c.Title)
	}
	Row(w, lead...)
	fmt.Fprintln(w, "|"+strings.Repeat("---|", len(lead)))
}

// Row writes the line of a subject.
func (t Table[R]) Row(w io.Writer, rounds []R, lead ...string) {
	for _, c := range t {
		lead = append(lead, c.Cell(rounds))
	}
	Row(w, lead...)
}

// Row writes a line of a table in Markdown.
func Row(w io.Writer, cells ...string) {
	fmt.Fprintln(w, "| "+strings.Join(cells, " | ")+" |")
}

// Judge writes whether a figure keeps its limit, as a line of a table.
func Judge(w io.Writer, what, format string, is, limit float64) {
	kept := "yes"
	if is > limit {
		kept = "no"
	}
	Row(w, what, fmt.Sprintf(format, is), fmt.Sprint("<= ", limit), kept)
}
