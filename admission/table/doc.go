// Package table is what an admission server keeps in memory: shards with a bucket
// for each key (shard.go; slot.go is how they lie in memory), how their credits leave
// for the store and a follower and come back (credit.go), and the answers that each
// asker was given lately, so that a question sent again is charged once (window.go).
// It is pure; a shard and a window each belong to the holder of the lock around it.
//
// Guarantee, with the store's rule (A, C) for a key: in any interval t the requests
// admitted have a cost of at most C + A*t, through retries and changes of the rule;
// shard_test.go, model_test.go and window_test.go check it against slow models. What a
// server may admit above it when it dies is admission/server's to say.
package table
