// Package server decides admission. The server answers questions over UDP from buckets in memory
// (udp.go). It looks up unknown keys in the store (lookup.go). It polls the store for rule edits and
// saves credits with each check-point (sync.go). Servers on the same store divide the keys (owners.go):
// each partition has one owner, which holds a lease. Each owner sends credits to a follower, which can
// take over (replicas.go).
//
// Concurrency: each socket has one goroutine. The sockets share the port, and the kernel sends all
// datagrams of an asker to the same socket. The keys are in 64 shards; a decision takes the lock of one
// shard. Each session has a lock for its answers. A goroutine holds at most one kind of lock, except
// rules.mu together with a shard's lock. saving is taken before any other lock.
//
// Guarantee. While the server runs, it admits at most C + A*t of a key in any interval t. After kill -9
// a key starts with the credits that were last sent to the follower, or with the credits of the last
// check-point. So the excess is at most the cost admitted since then, and never more than C. A strict
// key starts empty once the previous server's lease is over, so there is no excess. The same holds when
// another server takes over, with one exception: an owner that lives but is cut off from the store
// still decides for keys that are not strict. Both servers then admit C + A*t of such a key. Moving a
// partition neither loses nor adds credits.
//
// Two of three (owner, follower, store) decide. The owner decides for strict keys for 5 s after each
// renewal that the store accepted, and for 5 s after sending credits that the follower acknowledged.
// The follower may take over once the owner has been silent for 6 s to both the follower and the store.
// From then on the follower acknowledges nothing; nor does it if it has not read the store for 59 s.
// Other servers may take over once the follower has not renewed its lease for 60 s.
package server
