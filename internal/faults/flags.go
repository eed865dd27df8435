package faults

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// OneOf returns an error unless the flag's value is one of known.
func OneOf(flag, value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return fmt.Errorf("--%s %q is none of %s", flag, value, strings.Join(allowed, ", "))
}

// Within returns an error unless the flag's value is within its bounds.
func Within[T cmp.Ordered](flag string, value, low, high T) error {
	if value < low || value > high {
		return fmt.Errorf("--%s %v: want %v to %v", flag, value, low, high)
	}
	return nil
}
