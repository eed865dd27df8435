// Package stamp holds the types of time that the whole system shares, and says
// what each of them is worth. It is pure: it reads no clock. Clocks are read
// in internal/clock, once at the edge, and the reading travels as an argument.
//
// A token bucket judges a message by when it arrived, so an arrival carries
// not only a time but also where that time came from (Source). Read
// nsqd/broker next for how an arrival becomes an eligible time.
package stamp
