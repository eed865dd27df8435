// Package catalog is the state of the control plane: brokers, topics, the broker of each
// publisher, and allocations. It is pure and event-sourced. Only Apply changes the
// catalog, one event at a time. The same events in the same order give the same state, so
// a store needs to keep only the log of events.
//
// The catalog makes no decisions. Plans come from loaddistributor/placement, and the
// committer, loaddistributor/controller, carries out the effects. The catalog has no
// session, clock or wire format. Read event.go next for the events, then Catalog for the
// invariants.
package catalog
