// Package lookupd registers this node's topics and channels with nsqlookupd daemons, over their
// TCP protocol. Over HTTP it requests the channels of a topic on other nodes.
//
// The package is level-triggered: a caller only reports that something changed, and each
// connection then sends the difference between its registrations and the node's topics. So a
// reconnect loses no change, and a daemon that was down gets all registrations.
//
// The package must not know the broker: the caller provides a function that lists the topics.
// protocol.go encodes and decodes messages. peer.go serves one daemon, announcer.go all daemons.
//
// Source: nsq.io/components/nsqlookupd.html. The TCP protocol has no page; the source is the
// traffic between NSQ's nsqd and nsqlookupd.
package lookupd
