// Package scale measures what the control plane itself costs as a cluster grows:
// it brings up brokers and topics with the pure packages that decide and remember
// (placement, catalog, share, ledger), in the order in which the loaddistributor
// and the tbadaptor call them, counts the gRPC messages that each step means, and
// takes time and memory. It has no clock and no network of its own: a Meter is
// its clock, messages are counted and not sent. What goroutines, gRPC and logging
// cost is not in it.
package scale
