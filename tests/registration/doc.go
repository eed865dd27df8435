// Package registration drives nodes that register with the loaddistributor as
// with nsqlookupd: our nsqd, and NSQ's own. It is all tests, on processes and
// loopback, and sees what a consumer sees. The protocol itself is tested in
// loaddistributor/lookup.
package registration
