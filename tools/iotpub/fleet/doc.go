// Package fleet runs thousands of emulated publishers on a few threads. A fleet sends a
// schedule's events at the scheduled times, over one connection per publisher, and records
// every reply. The load is an open loop: an unanswered event never delays a later event,
// and latency counts from the intended send time.
//
// A worker (worker.go) owns a share of the publishers with all their state, and runs on its
// own thread. The worker waits in a poller both for the next send time and for replies, so
// a message costs no goroutine switch. The poller is rawfd.Poller, which is exact; Go's
// timers round up to a millisecond. On systems other than Linux a fleet returns an error.
//
// The package does not decide where a publisher connects. The caller passes the addresses
// to Assign (tools/iotpub/emulate gets them from the loaddistributor).
package fleet
