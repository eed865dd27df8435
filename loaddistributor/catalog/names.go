package catalog

import (
	"cmp"
	"iter"
	"slices"
)

// names is a sorted list in pieces, so that one more does not move all that come after it.
type names struct{ pieces [][]string } // none is empty

// maxPiece is how long a piece may be.
const maxPiece = 512

// find returns where the name is, or belongs.
func (n *names) find(name string) (piece, i int, found bool) {
	piece, found = slices.BinarySearchFunc(n.pieces, name, func(piece []string, name string) int { return cmp.Compare(piece[0], name) })
	if found || piece == 0 {
		return piece, 0, found
	}
	i, found = slices.BinarySearch(n.pieces[piece-1], name)
	return piece - 1, i, found
}

// insert adds a name. Requires: it is not there.
func (n *names) insert(name string) {
	if len(n.pieces) == 0 {
		n.pieces = [][]string{{name}}
		return
	}
	p, i, _ := n.find(name)
	piece := slices.Insert(n.pieces[p], i, name)
	if n.pieces[p] = piece; len(piece) > maxPiece {
		n.pieces[p] = piece[:maxPiece/2]
		n.pieces = slices.Insert(n.pieces, p+1, slices.Clone(piece[maxPiece/2:]))
	}
}

// remove takes a name out. Requires: it is there.
func (n *names) remove(name string) {
	p, i, _ := n.find(name)
	if n.pieces[p] = slices.Delete(n.pieces[p], i, i+1); len(n.pieces[p]) == 0 {
		n.pieces = slices.Delete(n.pieces, p, p+1)
	}
}

// after has the names that come after one, which need not be there; "": all.
func (n *names) after(name string) iter.Seq[string] {
	return func(yield func(string) bool) {
		p, i, found := n.find(name)
		if found {
			i++
		}
		for ; p < len(n.pieces); p, i = p+1, 0 {
			for _, name := range n.pieces[p][i:] {
				if !yield(name) {
					return
				}
			}
		}
	}
}
