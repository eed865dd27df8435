// Package order decides by the order of a map.
package order

import (
	"maps"
	"slices"
)

type table map[string]int

// First returns any.
func First(t table) string {
	for k := range t { // want "range over a map"
		return k
	}
	// order:
	for k := range t { // want "range over a map"
		return k
	}
	// order: far away is not on the line above

	for k := range t { // want "range over a map"
		return k
	}
	// The count of keys is what it is.
	// order: counting does not depend on it
	for range t {
	}
	keys := slices.Collect(maps.Keys(t)) // want "maps.Keys not sorted at once"
	next := maps.Values(t)               // want "maps.Values not sorted at once"
	// order: it is sorted below
	late := slices.Collect(maps.Keys(t))
	slices.Sort(late)
	_ = next
	return keys[0] + slices.SortedFunc(maps.Keys(t), func(a, b string) int { return len(a) - len(b) })[0]
}
