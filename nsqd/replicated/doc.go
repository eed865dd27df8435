// Package replicated is a commitlog.Log in a stream of NATS JetStream: what it has stored
// outlives the loss of a machine, as far as the stream has replicas. JetStream
// replicates; this package gives it offsets, an owner and cursors.
//
// A topic's part is what one broker carries of it. Each part has a stream; its messages
// are blocks of records (block.go). Cursors are in one stream for all parts, the newest
// snapshot of each by subject (cursors.go).
//
// An owner has an epoch. It claims the part by a block of its own, and each block says
// after which sequence of the stream it is to be stored: so from the moment at which
// another owner has claimed it, nothing of the owner before is stored any more
// (ErrFenced).
//
// Read log.go next.
package replicated
