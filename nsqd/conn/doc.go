// Package conn drives client sessions over sockets: it accepts, reads into the
// connection's buffer, lets nsq/session make sense of the bytes, acts on the
// broker for it, and writes what comes back. All decisions about the protocol
// are the session's; all about messages are the broker's.
//
// What connections have in common is the client (client.go; publish.go, batch.go,
// buffers.go), which knows its driver as an interface. There are two. On Linux,
// event loops serve connections that are plain or encrypted (loop_linux.go,
// secure_linux.go): read what is there, carry it out, write what came of it. A
// goroutine for each connection (goroutine.go, upgrade.go), and a second one for a
// subscriber's writes (writer.go), serves what is compressed, and all of it elsewhere.
//
// All connections of a loop wait while it carries out one command, so on a loop
// may run what is bounded by what came in one read, 64 KiB, and by a constant:
//   - parsing, of bodies that are bounded (wire.MaxIdentityBody), and of each
//     message of an MPUB once;
//   - steps of the broker whose time is that of the messages they are about, with
//     a topic's lock, which is never held for longer;
//   - reads and writes that do not block, and TLS of their bytes.
//
// What may not: the disk, the network, a question to an auth server, waiting for a
// lock that is held meanwhile, a topic's creation, a batch of more than 512 messages
// or 256 KiB (broker.ErrBusy), decompression, a TLS handshake; and nothing whose time grows with
// the messages, connections or topics that others have. Those are offloaded to a
// goroutine, for one operation or for good. Offloaded operations that keep a
// processor busy leave one to the loops. Parts of turns longer than 5 ms are counted
// by their cause (Stats.SlowTurns); tests/hostile attacks each of these rules.
//
// Why, and what that is worth: docs/decisions/0001-event-loops.md.
package conn
