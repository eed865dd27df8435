// Package search finds the maximum rate that keeps an SLO: first by doubling, then by
// bisection, and finally by a second try of the result. The caller tries the rate that
// Next returns and reports the outcome to Record. Judge derives the outcome from counts.
//
// The package is pure. Read tools/srtm/calibrate next, which sends the load.
package search
