// Package verify decides whether every accepted message was delivered exactly
// once. It is pure: sets of message numbers in, counts out, no lock, no clock.
// tools/iotpub/fleet owns the set of accepted messages while it sends,
// tools/iotpub/subscriber that of delivered ones; they are compared at the end.
package verify
