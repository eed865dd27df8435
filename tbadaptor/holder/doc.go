// Package holder is the other end of a ledger. It is pure. holdings.go records a member's share of each
// contract, and detects stale grants. lease.go computes how long the member may use shares without
// contact to the adaptor. nsqd/agent passes messages and the time in, and puts the results in force.
// Read tbadaptor/ledger next: the ledger's proof relies on this package.
package holder
