package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
)

// ErrAbsent means that a program is not installed.
var ErrAbsent = errors.New("not installed")

// Subject is the object of a measurement, and a row of the table.
type Subject[R any] struct {
	Name    string
	Err     error // why the subject did not start
	Measure func(round int) (R, error)
}

// Present returns the started subjects. Present reports subjects whose programs are not
// installed on out, and returns other start errors.
func Present[R any](out io.Writer, all []Subject[R]) (present []Subject[R], err error) {
	for _, s := range all {
		switch {
		case s.Err == nil:
			present = append(present, s)
		case errors.Is(s.Err, ErrAbsent):
			fmt.Fprintf(out, "%s: skipped: %v\n", s.Name, s.Err)
		default:
			err = errors.Join(err, fmt.Errorf("%s: %w", s.Name, s.Err))
		}
	}
	return present, err
}

// Rounds measures every subject once per round. Each round starts with another subject, so
// a temporary disturbance affects all subjects alike. Rounds returns the results by name,
// in the order of the rounds.
func Rounds[R any](ctx context.Context, rounds int, subjects []Subject[R]) (map[string][]R, error) {
	got := make(map[string][]R)
	for round := range rounds {
		for i := range subjects {
			s := subjects[(i+round)%len(subjects)]
			r, err := s.Measure(round)
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return nil, fmt.Errorf("round %d, %s: %w", round+1, s.Name, err)
			}
			got[s.Name] = append(got[s.Name], r)
		}
	}
	return got, nil
}

// Median returns the median of a metric over several rounds.
//
// Requires: rounds is not empty.
func Median[R any](rounds []R, value func(R) float64) float64 {
	figures := make([]float64, len(rounds))
	for i, r := range rounds {
		figures[i] = value(r)
	}
	slices.Sort(figures)
	return Middle(figures)
}

// Target is an upper bound on a metric. Value returns the metric, if its subjects took part.
type Target[R any] struct {
	What, Format string
	Limit        float64
	Value        func(results map[string][]R) (value float64, known bool)
}

// Ratio is a target for the ratio of two subjects' medians.
func Ratio[R any](what, numerator, denominator string, figure func(R) float64, limit float64) Target[R] {
	return Target[R]{what, "%.2f", limit, func(results map[string][]R) (float64, bool) {
		if len(results[numerator]) == 0 || len(results[denominator]) == 0 {
			return 0, false
		}
		return Median(results[numerator], figure) / Median(results[denominator], figure), true
	}}
}

// Judge writes a table of the targets and whether they are met.
func Judge[R any](w io.Writer, what string, results map[string][]R, targets []Target[R]) {
	fmt.Fprintln(w)
	Head(w, what, "is", "target", "kept")
	for _, t := range targets {
		value, known := t.Value(results)
		if !known {
			continue
		}
		met := "yes"
		if value > t.Limit {
			met = "no"
		}
		Row(w, t.What, fmt.Sprintf(t.Format, value), fmt.Sprint("<= ", t.Limit), met)
	}
}
