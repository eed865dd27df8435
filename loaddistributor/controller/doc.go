// Package controller is the single writer of the control plane. It reads a
// snapshot of the catalog, lets loaddistributor/placement decide, commits the
// event, and then tells brokers, the adaptor and watchers. It knows gRPC
// messages as data and no gRPC: loaddistributor/rpc and loaddistributor/lookup
// are the ways in, an Adaptor the way out.
//
// What becomes of a topic is decided by its machine, loaddistributor/reconcile,
// for creations, deletions, moves and all that undoes them; its owner, one
// goroutine, does what is wanted of the topic in turn (owner.go). What brokers and
// the adaptor should have is compared once a period, and when something has
// happened, with what they are known to have, and the difference is asked for again
// (contracts.go, reconcile.go).
//
// What it knows is state, of which all methods require its lock, mu; what waits, or calls
// out, is a method of Controller and does so without. Lock order: placing before mu.
package controller
