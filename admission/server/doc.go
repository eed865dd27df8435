// Package server decides admission. It answers questions over UDP from buckets in
// memory (udp.go), gets what it does not have from the store (lookup.go), and keeps
// the two alike (sync.go): edits of rules reach it within a poll, what keys hold goes
// to the store with each check-point. With others on the same store it divides the
// keys (owners.go): each partition has one owner, by a lease, and each owner a follower
// (replicas.go), which is sent what keys hold and takes over.
//
// Concurrency: one goroutine a socket, each with a port-sharing socket of its own, so
// that an asker is always heard by the same one; 64 shards with a lock each, of which
// a decision takes one; a lock around each session's answers, held for the look at
// them only. No two locks of different kinds are held at once, but rules.mu
// with a shard. saving is taken before any.
//
// Guarantee. While the server runs: at most C + A*t of a key in any interval t. After
// kill -9 a key starts with what its follower was sent last, or with what it held at the last
// check-point, so that it is admitted at most what it was admitted since then more, and
// never more than C; a strict key starts empty, once the
// lease of the server before is over, so that it is admitted nothing more. The same holds when another server takes over, but that an
// owner that lives and is cut off from the store goes on with keys that are not strict:
// then they are admitted C + A*t by each. A move of a partition loses and adds nothing.
//
// Of an owner, its follower and the store two decide. The owner goes on with strict keys
// for 5 s after the store took its renewal, or after it sent what its follower
// acknowledged; the follower acknowledges nothing once it may take over, which is 6 s
// after both were silent, nor when it has not read the store for 59 s; and others take over
// when it has not renewed its lease there for 60 s.
package server
