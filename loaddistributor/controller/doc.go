// Package controller is the single writer of the control plane. It reads a
// snapshot of the catalog, lets loaddistributor/placement decide, commits the
// event, and then tells brokers, the adaptor and watchers. It knows gRPC
// messages as data and no gRPC: loaddistributor/rpc and loaddistributor/lookup
// are the ways in, an Adaptor the way out.
//
// What it knows is state, of which all methods require its lock, unless they say that they
// take it. Around it are parts that each have what they need, and none the Controller:
//
//	reader     what can be read, on a follower too (status.go, directory.go, watch.go)
//	committer  takes what is staged to the journal, and shows it then (commit.go)
//	planner    makes plans, one at a time (plan.go)
//	owners     change topics: each by one goroutine, one operation after the other
//	           (owner.go), each operation a change around the topic's machine,
//	           loaddistributor/reconcile (change.go)
//	mover      moves topics by itself, away from brokers that drain or are gone
//	           (evacuate.go, takeover.go)
//	contracts  compares what the adaptor has with what it should have (contracts.go)
//	tuning     does what loaddistributor/tuner wants (tuning.go)
//	learning   has open topics placed by who publishes to them (learn.go)
//	witness    finds out whether a broker's process has ended (evidence.go)
//
// A Controller takes requests (create.go, move.go, brokers.go, seek.go, restore.go) and what
// brokers say (session.go), and has the parts look once a period (Controller.tick). What
// brokers should have is compared then, too, and the difference asked for again (work.go).
//
// Arrows go one way: requests, mover, tuning, learning and contracts have owners change
// topics, those have the planner plan, and that commits. Lock order: planner.turn before
// state's lock.
package controller
