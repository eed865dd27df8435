// Package registry is the state of nsqlookupd: the nodes registered over its TCP
// protocol, with their topics and channels, and the topics and channels that an operator
// created, deleted or tombstoned. command.go parses the protocol, registry.go holds the
// state and handles commands, directory.go answers queries.
//
// The package is pure: it has no socket and no clock, and a connection is a number. It
// must not depend on the controller's brokers. Package lookup combines both and drives
// the registry.
//
// Source: nsq.io/components/nsqlookupd.html for the HTTP side and the meaning of a
// tombstone. The TCP protocol has no page; the source is the traffic between NSQ's nsqd
// and nsqlookupd.
package registry
