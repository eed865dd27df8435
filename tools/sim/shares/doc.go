// Package shares simulates how shares follow the traffic and survive trouble: brokers
// with the buckets that production has, reports every step, leases, placements that
// change, brokers that die and come back, and publishers that follow. It computes on
// what it is given and does no I/O; all algorithms are tbadaptor/share's,
// tbadaptor/ledger's and tokenbucket's own.
package shares
