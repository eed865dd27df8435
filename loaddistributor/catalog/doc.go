// Package catalog is the state of the control plane: brokers, topics, where
// each publisher goes, what is allocated to which topic. It is pure and event-sourced:
// Apply is the only way to change it, one event at a time, and the same events
// in the same order give the same state, so a log of events is all that a
// store has to keep.
//
// It decides nothing: plans come from loaddistributor/placement, and the
// committer, loaddistributor/controller, carries the effects out. It knows no
// session, no clock and no wire format. Read event.go next for what can
// happen, then Catalog for what must hold.
package catalog
