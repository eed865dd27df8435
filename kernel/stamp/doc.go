// Package stamp says when a message arrived, and what that is worth: an arrival
// carries a time and where that time came from (Source), because a token bucket
// judges a message by it. It is pure and reads no clock. Read nsqd/broker next
// for how an arrival becomes an eligible time.
package stamp
