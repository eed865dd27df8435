package catalog

import (
	"cmp"
	"iter"
	"slices"
)

// names is a sorted list in pieces, so an insertion does not move all later names.
type names struct{ pieces [][]string } // none is empty

// maxPiece is the maximum length of a piece.
const maxPiece = 512

// find returns the position of the name, or the position for its insertion.
func (n *names) find(name string) (piece, i int, found bool) {
	piece, found = slices.BinarySearchFunc(n.pieces, name, func(piece []string, name string) int { return cmp.Compare(piece[0], name) })
	if found || piece == 0 {
		return piece, 0, found
	}
	i, found = slices.BinarySearch(n.pieces[piece-1], name)
	return piece - 1, i, found
}

// insert adds a name. Requires: the name is absent.
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

// remove removes a name. Requires: the name is present.
func (n *names) remove(name string) {
	p, i, _ := n.find(name)
	if n.pieces[p] = slices.Delete(n.pieces[p], i, i+1); len(n.pieces[p]) == 0 {
		n.pieces = slices.Delete(n.pieces, p, p+1)
	}
}

// after returns the names after the given name, which may be absent; "": all names.
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
