// Package conn drives client sessions over sockets. It accepts connections, reads bytes, lets
// nsq/session parse them, calls the broker, and writes the replies. The session makes all decisions
// about the protocol. The broker makes all decisions about messages.
//
// A client (client.go, publish.go, batch.go, buffers.go) is the part that all connections share. It
// sees its driver as an interface. There are two drivers:
//   - On Linux, event loops (loop_linux.go, timers_linux.go) serve plain connections, and with
//     secure_linux.go encrypted connections.
//   - A goroutine for each connection (goroutine.go, upgrade.go), and a second goroutine for a
//     subscriber's writes (writer.go), serve compressed connections, and all connections on other
//     systems.
//
// While a loop carries out one command, all its other connections wait. So a loop only runs work
// that is bounded by the bytes of one read (64 KiB) and by a constant:
//   - parsing of bodies of bounded size (wire.MaxIdentityBody), and of each message of an MPUB
//     once;
//   - broker steps that take time in proportion to their messages, under a topic lock, which is
//     never held for longer;
//   - nonblocking reads and writes, and TLS for their bytes.
//
// All other work is offloaded to a goroutine, for one operation or for the rest of the connection:
//   - use of the disk or the network, and queries to an auth server;
//   - waiting for a lock that is held during such work;
//   - creation of a topic;
//   - a batch of more than 512 messages or 256 KiB (broker.ErrBusy);
//   - decompression and TLS handshakes;
//   - work that grows with the messages, connections or topics of other clients.
//
// Offloaded operations that use much processor time leave one processor to the loops.
// Stats.SlowTurns counts the parts of turns that took longer than 5 ms, by cause. tests/hostile
// attacks each of these rules.
//
// docs/decisions/0001-event-loops.md explains the design and its gains.
package conn
