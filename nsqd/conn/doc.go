// Package conn drives client sessions over sockets: it accepts, reads into the
// connection's buffer, lets nsqd/session make sense of the bytes, acts on the
// broker for it, and writes what comes back. All decisions about the protocol
// are the session's; all about messages are the broker's.
//
// Two drivers stand side by side. On Linux, event loops serve plain connections
// (loop_linux.go): read what is there, carry it out, write what came of it. A
// goroutine for each connection, and a second one for a subscriber's writes
// (client.go, writer.go), serves what is encrypted or compressed, and all of it
// elsewhere. Sessions and subscriptions know nothing of either. Why, and what
// that is worth: docs/decisions/0001-event-loops.md.
package conn
