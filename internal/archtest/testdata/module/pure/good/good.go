// Package good uses all that a pure package may.
package good

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// ErrFull is a sentinel; it may be exported.
var ErrFull = errors.New("full")

var _ fmt.Stringer = level(0) // an assertion, no variable

type level int

func (l level) String() string { return levels[l] }

type row struct {
	name string
	size int
	tags []string
}

func (r row) text() string { return r.name }

var (
	levels = [...]string{"low", "high"}
	byName = map[string]int{"low": 0, "high": 1}
	rows   = []row{{name: "a", size: 1}}
	square = func(n int) int { return n * n }
	tick   = time.Second
	origin row
)

// Read reads variables in every permitted way.
func Read(rng *rand.Rand, d time.Duration, own map[string]int) (string, int, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "%v", d.Round(tick))
	n := byName["low"] + len(rows) + square(rows[0].size) + rng.IntN(3) + len(rows[0].tags)
	for i := range rows {
		n += i
	}
	for _, name := range levels {
		b.WriteString(name)
	}
	copied := levels
	copied[0] = "mine"
	if slices.Contains(rows[0].tags, "x") || rows == nil || origin.size > 0 {
		return strings.Join(rows[0].tags, ","), n, ErrFull
	}
	for _, key := range slices.Sorted(maps.Keys(own)) {
		n += own[key]
	}
	// order: a sum is the same in any order
	for _, v := range own {
		n += v
	}
	// Its own local state is its own business.
	local := map[string]int{}
	local["a"]++
	_ = rows[0].text()
	return b.String(), n, fmt.Errorf("read: %w", ErrFull)
}

// Seeded makes a generator from an argument.
func Seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }
