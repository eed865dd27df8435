package host

import (
	"cmp"
	"context"
	"fmt"
	"slices"
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
