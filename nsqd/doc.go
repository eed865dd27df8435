// Command nsqd is SRTM's broker. It speaks the NSQ protocol, so that every
// NSQ client library works with it unchanged, and holds a share (r, b) of each
// topic's contract.
//
// A message's path: conn reads it, session and wire understand it, kernel/hook
// says when it arrived, broker and queue hold it until tokenbucket lets it go,
// and conn writes it to a subscriber. Read docs/ARCHITECTURE.md next.
package main
