// Package table is the memory of an admission server. shard.go has a bucket for each key, slot.go the
// memory layout of buckets. credit.go exports credits to the store and the follower and imports them.
// window.go keeps the last answers to each asker, so that a question sent again is charged once. The
// package is pure. The holder of the lock around a shard or a window owns it.
//
// Guarantee, for a key with the rule (A, C): in any interval t the admitted requests cost at most C +
// A*t in total, through retries and changes of the rule. shard_test.go, model_test.go and
// window_test.go check the guarantee against slow models. admission/server states what a server may
// admit beyond it after a crash.
package table
