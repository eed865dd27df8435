package table_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// BenchmarkTenMillionKeys has as many keys of 20 bytes as a server by default, in as many shards. It
// measures the memory of a key, the time of a decision about any key, the time of a collection, and
// the longest time that a shard was busy learning one key. The comparison is a plain map of buckets.
func BenchmarkTenMillionKeys(b *testing.B) {
	if testing.Short() {
		b.Skip("takes some GB")
	}
	const keys, shards = 10_000_000, 64
	r := &rule.Rule{Key: "*", Share: tokenbucket.Share{Rate: 1000, Burst: 10}}
	now, cost := mono.Time(0), int64(1)
	fill := func(b *testing.B, learn func(shard int, key string), ask func(shard int, key []byte) bool) {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		began, longest := clock.Mono(), time.Duration(0)
		for i := range keys {
			key := fmt.Sprintf("tenant/%013d", i)
			start := clock.Mono()
			learn(i%shards, key)
			longest = max(longest, clock.Mono().Sub(start))
		}
		learned := clock.Mono().Sub(began)
		runtime.GC()
		began = clock.Mono()
		runtime.GC()
		collected := clock.Mono().Sub(began)
		runtime.ReadMemStats(&after)
		random, key := rand.New(rand.NewPCG(1, 2)), make([]byte, 0, 20)
		for b.Loop() {
			i := random.IntN(keys)
			key = fmt.Appendf(key[:0], "tenant/%013d", i)
			if now += 1000; !ask(i%shards, key) {
				b.Fatalf("%s is not known", key)
			}
		}
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/keys, "B/key")
		b.ReportMetric(float64(learned.Nanoseconds())/keys, "ns/learned")
		b.ReportMetric(float64(longest.Microseconds()), "us/longest")
		b.ReportMetric(float64(collected.Microseconds())/1000, "ms/collection")
	}
	b.Run("table", func(b *testing.B) {
		var all [shards]*table.Shard
		for i := range all {
			all[i] = table.New(keys)
		}
		fill(b, func(shard int, key string) { all[shard].Learn(key, r, 0, 0) },
			func(shard int, key []byte) bool { return all[shard].Ask(key, cost, now, false).Known })
	})
	b.Run("model", func(b *testing.B) {
		var all [shards]*model
		for i := range all {
			all[i] = newModel(keys)
		}
		fill(b, func(shard int, key string) { all[shard].Learn(key, r, 0, 0) },
			func(shard int, key []byte) bool { return all[shard].Ask(string(key), cost, now, false).Known })
	})
}
