// Package stamp determines when a message arrived and how accurate that time is. An Arrival has a
// time and a Source, because a token bucket judges a message by its arrival. The package is pure
// and reads no clock. Read nsqd/broker next for how an arrival becomes an eligible time.
package stamp
