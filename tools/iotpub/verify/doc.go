// Package verify decides whether every accepted message was delivered exactly once. The
// package is pure: sets of message numbers in, counts out, no lock, no clock.
// tools/iotpub/fleet owns the set of accepted messages, tools/iotpub/subscriber the set of
// delivered messages. The sets are compared at the end.
package verify
