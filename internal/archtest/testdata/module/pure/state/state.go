// Package state keeps some.
package state

import (
	"slices"
	"sort"
)

type counter struct {
	n    int
	seen map[string]bool
}

func (c *counter) inc()    { c.n++ }
func (c counter) get() int { return c.n }

var (
	Limit   = 3 // want "exported variable Limit"
	total   int
	counts  = map[string]int{}
	names   = []string{"b", "a"}
	matrix  = [][]int{{1}}
	grid    [2]int
	single  counter
	pointer     = &single // want "variable pointer is a pointer" // want "address of single"
	any1    any = 1       // want "variable any1 is an interface"
	queue   func()
)

func init() {
	total = 1 // want "assignment to total"
}

func use(keep *[]string, f func([]string)) []string {
	total++                      // want "assignment to total"
	total += 2                   // want "assignment to total"
	counts["a"] = 1              // want "assignment to counts"
	counts["a"]++                // want "assignment to counts"
	delete(counts, "a")          // want "counts escapes"
	clear(counts)                // want "counts escapes"
	names[0] = "z"               // want "assignment to names"
	sort.Strings(names)          // want "names escapes"
	slices.Sort(names)           // want "names escapes"
	*keep = names                // want "names escapes"
	f(names)                     // want "names escapes"
	mine := append(names, "c")   // want "names escapes"
	copy(names, mine)            // want "names escapes"
	grid[0] = 1                  // want "assignment to grid"
	part := grid[:]              // want "address of grid"
	single.n = 2                 // want "assignment to single"
	single.inc()                 // want "method inc of single"
	late := single.inc           // want "method inc of single"
	at := &single.n              // want "address of single"
	queue = late                 // want "assignment to queue"
	for _, row := range matrix { // want "matrix escapes"
		row[0] = 1
	}
	for total = range 3 { // want "assignment to total"
	}
	alias := single.seen // want "single escapes"
	alias["x"] = *at == part[0]
	_ = single.get()
	(total) = 3 // want "assignment to total"
	if len(names) > 3 {
		return append(mine, names...)
	}
	return names // want "names escapes"
}
