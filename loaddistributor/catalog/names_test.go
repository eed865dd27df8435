package catalog

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// Many names come and go in any order. The list equals a sorted slice, and no piece is long.
func TestNamesAreSorted(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	var n names
	added := map[string]bool{}
	for i := range 20_000 {
		if name := fmt.Sprint(rng.IntN(6000)); i >= 12_000 && added[name] || i < 12_000 && added[name] && i%3 == 0 {
			n.remove(name)
			delete(added, name)
		} else if i < 12_000 && !added[name] {
			n.insert(name)
			added[name] = true
		}
	}
	want := sorted(added)
	if got := slices.Collect(n.after("")); len(want) < 100 || !slices.Equal(got, want) {
		t.Fatalf("%d names, want %d", len(got), len(want))
	}
	for i, name := range want {
		for next := range n.after(name) {
			if i++; next != want[i] {
				t.Fatalf("%s after %s, want %s", next, name, want[i])
			}
			break
		}
	}
	for _, piece := range n.pieces {
		if len(piece) == 0 || len(piece) > maxPiece {
			t.Errorf("a piece of %d names", len(piece))
		}
	}
	for _, name := range want {
		n.remove(name)
	}
	if n.insert("x"); len(n.pieces) != 1 {
		t.Errorf("%d pieces for one name", len(n.pieces))
	}
}
