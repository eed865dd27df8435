// Package controller is the single writer of the control plane. It reads a snapshot of
// the catalog, asks loaddistributor/placement for a plan, commits the event, and then
// informs brokers, the adaptor and watchers. It uses gRPC messages as data, without gRPC
// calls: loaddistributor/rpc and loaddistributor/lookup serve the requests, and an
// Adaptor makes the calls to the adaptor.
//
// The controller's data is in type state. The caller of a state method holds the state's
// lock, unless the method's comment says otherwise. Each part of the controller receives
// only the dependencies it uses; no part refers to the Controller:
//
//	reader     serves reads, on a follower too (status.go, directory.go, watch.go)
//	committer  appends staged events to the journal, then shows them (commit.go)
//	planner    makes plans, one at a time (plan.go)
//	owners     change topics. One goroutine per topic runs one operation after the
//	           other (owner.go). An operation is a change that drives the topic's
//	           state machine, loaddistributor/reconcile (change.go).
//	mover      moves topics away from brokers that drain or are gone
//	           (evacuate.go, takeover.go)
//	contracts  compares the adaptor's contracts with the catalog (contracts.go)
//	tuning     carries out the effects of loaddistributor/tuner (tuning.go)
//	learning   places open topics by their learned publishers (learn.go)
//	witness    finds out whether a broker's process has ended (evidence.go)
//
// A Controller receives requests (create.go, move.go, brokers.go, seek.go, restore.go)
// and messages of brokers (session.go). Once per report interval it runs the parts
// (Controller.tick). It also compares each broker with the catalog then, and requests
// missing work again (work.go).
//
// Calls go one way: requests, mover, tuning, learning and contracts use owners to change
// topics; owners use the planner; the planner commits. Lock order: planner.turn before
// state's lock.
package controller
