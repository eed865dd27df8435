// Package search finds the maximum rate that something keeps: by doubling until
// it does not, then by halves, and at last by asking once more. It says which rate
// to try next and is told what became of it; it does not know how a rate is tried.
// Judge says what became of it, from counts.
//
// It is pure. tools/srtm/calibrate, which sends the load, is the place to read
// next.
package search
