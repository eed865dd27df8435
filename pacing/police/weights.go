package police

import (
	"strconv"
	"strings"
)

// Group entitles publishers to a weight by their ids: "<Key>.0" to "<Key>.<Count-1>",
// or the id Key itself where Count is 0.
type Group struct {
	Key    string
	Count  int
	Weight uint8 // at least 1
}

// Weights are what publishers are entitled to.
type Weights struct {
	Groups []Group
	// Most is for those whom no group has; at least 1.
	Most uint8
}

// of returns the weight of a publisher that wishes for one; 0: it has not said. Then
// it gets what a group gives it, else 1.
func (w *Weights) of(id string, wish uint8) float64 {
	most, listed := max(w.Most, 1), false
	for _, g := range w.Groups {
		if g.has(id) {
			most, listed = max(g.Weight, 1), true
			break
		}
	}
	switch {
	case wish > 0:
		most = min(most, wish)
	case !listed:
		most = 1
	}
	return float64(most)
}

func (g *Group) has(id string) bool {
	if g.Count == 0 {
		return id == g.Key
	}
	number, ok := strings.CutPrefix(id, g.Key)
	if !ok || len(number) < 2 || number[0] != '.' {
		return false
	}
	n, err := strconv.Atoi(number[1:])
	return err == nil && n >= 0 && n < g.Count && strconv.Itoa(n) == number[1:]
}
