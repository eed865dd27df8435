package police

import (
	"strconv"
	"strings"
)

// Group permits a weight to publishers by id: "<Key>.0" to "<Key>.<Count-1>", or the id Key itself
// if Count is 0.
type Group struct {
	Key    string
	Count  int
	Weight uint8 // at least 1
}

// Weights are the permitted weights.
type Weights struct {
	Groups []Group
	// Max is the limit for publishers without a group; at least 1.
	Max uint8
}

// effective returns the weight of a publisher that requests wish. If wish is 0, the publisher gets its
// group's weight, or 1 without a group.
func (w *Weights) effective(id string, requested uint8) float64 {
	weight, listed := max(w.Max, 1), false
	for _, g := range w.Groups {
		if g.contains(id) {
			weight, listed = max(g.Weight, 1), true
			break
		}
	}
	switch {
	case requested > 0:
		weight = min(weight, requested)
	case !listed:
		weight = 1
	}
	return float64(weight)
}

func (g *Group) contains(id string) bool {
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
