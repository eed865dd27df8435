// Package registration drives nodes that register with the loaddistributor as with nsqlookupd: our
// nsqd, and NSQ's own. The package contains only tests, on processes and loopback, and sees what a
// consumer sees. loaddistributor/lookup tests the protocol itself.
package registration
