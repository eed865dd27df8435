// Package holder is a ledger's other end, pure: what a member holds of each contract
// and which grant is stale (holdings.go), and until when it may use that without a word
// from the adaptor (lease.go). nsqd/agent gives it the messages and the time, and puts in
// force what it says. Read tbadaptor/ledger next for what the proof
// of the contract relies on.
package holder
