// Package lookupd tells nsqlookupd daemons which topics and channels this node
// has, over their TCP protocol, and asks them over HTTP which channels a topic
// has on other nodes.
//
// It is level-triggered: a caller that changes something only says so, and each
// connection then sends the difference between what it has registered and what
// there is. So nothing is lost by changes during a reconnect, and a daemon that
// was away is told everything.
//
// It must not know the broker: it is given a function that lists the topics.
// protocol.go has the bytes, peer.go one daemon, announcer.go all of them.
//
// Source: nsq.io/components/nsqlookupd.html, and for the TCP protocol, which
// has no page of its own, what NSQ's nsqd and nsqlookupd say to each other.
package lookupd
