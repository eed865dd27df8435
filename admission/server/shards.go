package server

import (
	"sync"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
)

const shardCount = 64

// shards holds the keys. Partition p is in shard p % shardCount.
type shards [shardCount]struct {
	sync.Mutex
	keys *table.Shard
}

// locked calls f with the shard of key. It holds the shard's lock.
func (s *shards) locked(key string, f func(keys *table.Shard)) {
	s.each(rule.Partition(key, rule.Partitions)%shardCount, f)
}

func (s *shards) each(i int, f func(keys *table.Shard)) {
	sh := &s[i]
	sh.Lock()
	defer sh.Unlock()
	f(sh.keys)
}

// inTurns calls f until f has passed over all slots of a shard, and releases the lock between calls.
func (s *shards) inTurns(i int, f func(keys *table.Shard, from int32) (next int32)) {
	for from, more := int32(0), true; more; more = from != 0 {
		s.each(i, func(keys *table.Shard) { from = f(keys, from) })
	}
}

// allInTurns calls inTurns for each shard.
func (s *shards) allInTurns(f func(keys *table.Shard, from int32) (next int32)) {
	for i := range s {
		s.inTurns(i, f)
	}
}

func (s *shards) unread(reader table.Reader, credits []table.Credit) {
	for i := range credits {
		s.locked(credits[i].Key, func(keys *table.Shard) { keys.Unread(reader, credits[i:i+1]) })
	}
}

func (s *shards) len() (n int) {
	for i := range s {
		s.each(i, func(keys *table.Shard) { n += keys.Len() })
	}
	return n
}
