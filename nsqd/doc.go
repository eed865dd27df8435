// Command nsqd is SRTM's broker. nsqd speaks the NSQ protocol, so NSQ client libraries work unchanged.
// The broker holds a share (r, b) of each topic's contract.
//
// Package conn reads a message, session and wire decode the message, and kernel/hook determines its
// arrival time. broker and queue hold the message until tokenbucket releases it, and conn writes the
// message to a subscriber. Read docs/ARCHITECTURE.md next.
package main
