// Package controller is the single writer of the control plane. It reads a snapshot of
// the catalog, asks loaddistributor/placement for a plan, commits the event, and then
// informs brokers, the adaptor and watchers. It uses gRPC messages as data, without gRPC
// calls: loaddistributor/rpc and loaddistributor/lookup serve the requests, and an
// Adaptor makes the calls to the adaptor.
//
// A Controller owns the data and the lock, makes the parts (Controller.wire), and
// receives requests and messages of brokers. The data is:
//
//	pipeline   the catalog, and the staged events (journal.go)
//	brokers    sessions of brokers, and who owns a broker's id (brokers.go)
//	topics     data about topics beside the catalog (topics.go)
//	knowledge  how complete the catalog of this process is (follower.go)
//
// One lock guards the data, because most decisions read all of it. A part holds the
// pieces of data that it uses, and no part refers to the Controller:
//
//	View       serves reads, on a follower too (view.go)
//	committer  appends staged events to the journal; announcer shows them (journal.go)
//	planner    makes plans, one at a time (planner.go)
//	owners     change topics. One goroutine per topic runs one operation after the
//	           other (owners.go). An operation is a change that drives the topic's
//	           state machine, loaddistributor/reconcile (change.go).
//	requests   sends brokers the work that they lack (requests.go)
//	channels   keeps the brokers' channels up to date (channels.go)
//	mover      moves topics away from brokers that drain or are gone (evacuation.go)
//	contracts  compares the adaptor's contracts with the catalog (contracts.go)
//	judge      keeps the verdicts about topics (judge.go)
//	tuning     carries out the effects of loaddistributor/tuner (tuning.go)
//	learning   places open topics by their learned publishers (learning.go)
//	copies     rebuilds lost topics from the brokers' copies (recovery.go)
//	witness    finds out whether a broker's process has ended (identity.go)
//
// Once per report interval the Controller runs the parts (Controller.tick).
//
// Calls go one way: requests of clients, mover, tuning, learning and contracts use owners
// to change topics; owners use the planner; the planner commits. Lock order:
// planner.turn before the controller's lock.
package controller
