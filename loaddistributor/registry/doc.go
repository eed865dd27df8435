// Package registry is what nsqlookupd knows: the nodes that registered over its
// TCP protocol, with their topics and channels, and what an operator created,
// deleted or tombstoned. command.go parses the protocol, registry.go is the
// state and answers commands, directory.go answers questions.
//
// It is pure: it has no socket and no clock, and a connection is a number to
// it. It must not know the brokers that the controller knows by itself; package
// lookup puts both together, and drives this one.
//
// Source: nsq.io/components/nsqlookupd.html for the HTTP side and the meaning of
// a tombstone; the TCP protocol has no page of its own and is what NSQ's nsqd
// and nsqlookupd say to each other on the wire.
package registry
