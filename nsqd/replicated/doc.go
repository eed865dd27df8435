// Package replicated implements commitlog.Log as a stream of NATS JetStream. Stored records
// survive the loss of a machine if the stream has replicas. JetStream replicates; this package
// adds offsets, an owner and cursors.
//
// A part is what one broker carries of a topic. Each part has its own stream. The messages of the
// stream are blocks of records (block.go). One stream holds the cursors of all parts: the newest
// snapshot of each part, by subject (cursors.go).
//
// An owner has an epoch and claims the part by storing a block of its own. Each block names the
// sequence of the stream after which JetStream must store the block. So once a new owner has
// claimed the part, JetStream refuses every block of the previous owner (ErrFenced).
//
// Read log.go next.
package replicated
