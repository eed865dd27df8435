// Package auth asks an HTTP auth server what a client may do, and checks permissions against the
// answer. It knows the auth server's protocol and no connections: nsqd/conn remembers a
// connection's answer and asks again when the answer expires. For requests without a connection,
// Cache does the same.
//
// Source: the section AUTH of nsq.io/components/nsqd.html. Where the section leaves a choice, the
// package behaves as NSQ's nsqd does, so an auth server means the same after a change of brokers.
package auth
