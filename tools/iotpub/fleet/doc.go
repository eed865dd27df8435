// Package fleet is thousands of emulated publishers on a few threads: it sends
// what a schedule says when the schedule says it, over one connection for each
// publisher, and keeps account of every answer. The load is an open loop: an
// event is never put off because an earlier one is unanswered, and times count
// from the intended send time.
//
// A worker (worker.go) owns a share of the publishers and everything of theirs,
// and runs on a thread of its own: it waits for the next send time or for
// answers in one place, a poller, so a message costs no goroutine switch. On
// Linux the poller is internal/poll, which is exact where Go's timers
// round up to a millisecond; elsewhere it is net.Conn and goroutines.
//
// The package does not know who says where a publisher connects: Assign takes
// it from outside (tools/iotpub/emulate asks the loaddistributor).
package fleet
