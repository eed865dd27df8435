package server

import (
	"context"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/admission/lease"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

const (
	maxLeased  = 20_000                 // keys that are divided; of others nothing is leased
	lookLeases = 200 * time.Millisecond // between looks at them
)

// leases are the keys of which others hold a part.
type leases struct {
	mu   sync.Mutex
	keys map[string]*lease.Key // each lent by its shard
	// quiet is until when another owner's leases may last, of the partitions that had one
	// before; until lease.Quiet before that it may live on and grant.
	quiet [rule.Partitions]mono.Time

	// set once
	shards *shards
	owners *atomic.Pointer[owners]
	alone  func() bool
	now    func() table.Now // the store's
}

// own is told which partitions are those that it was before, and decided here, before
// anything is decided for the others.
func (l *leases) own(kept *[rule.Partitions]bool, before, t *owners, now table.Now) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.keys, func(key string, _ *lease.Key) bool { return !kept[rule.Partition(key, rule.Partitions)] })
	for p := range kept {
		if is := &t.all[p]; t.mine[p] && !kept[p] && (is.Epoch > 1 || before.instance != 0) {
			l.quiet[p] = now.Mono.Add(max(0, is.Lost-now.Wall) + lease.Quiet)
		}
	}
}

// since is from when on leased keys of a partition earn credits: what they had before may be
// held elsewhere. 0: it is not.
func (l *leases) since(partition int) mono.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.quiet[partition]
}

// grant answers a holder. It reports false where there is nothing to be granted.
func (l *leases) grant(q *wire.Question, v *table.Verdict) (a wire.Answer, g wire.Grant, ok bool) {
	if !v.Leased {
		return a, g, false
	}
	p := rule.Partition(q.Key, rule.Partitions)
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	quiet := l.quiet[p]
	if !l.owners.Load().mine[p] || !l.alone() || now.Mono.Before(quiet.Add(-lease.Quiet)) {
		return a, g, false
	}
	k := l.keys[string(q.Key)]
	if k == nil {
		if len(l.keys) >= maxLeased {
			return a, g, false
		}
		var contract tokenbucket.Share
		var credits tokenbucket.Tokens
		var known bool
		l.shards.locked(string(q.Key), func(keys *table.Shard) { contract, credits, known = keys.Lend(q.Key, now.Mono) })
		if !known {
			return a, g, false
		}
		if now.Mono.Before(quiet) {
			contract = tokenbucket.Share{}
		}
		k = lease.New(now.Mono, uint64(now.Wall), string(q.Key), contract, credits)
		l.keys[string(q.Key)] = k
	}
	if g, ok = k.Renew(now.Mono, q.Held, q.Cost); !ok {
		return a, g, false
	}
	a = wire.Answer{Kind: wire.Granted, Flags: wire.Leased, Session: q.Session, Number: q.Number, Value: uint32(lease.Length.Milliseconds())}
	if v.Shadow {
		a.Flags |= wire.Shadow
	}
	if v.FailOpen {
		a.Flags |= wire.FailOpen
	}
	return a, g, true
}

// decide corrects a verdict by what the owner holds of the key.
func (l *leases) decide(key []byte, cost int64, peek bool, v *table.Verdict) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.keys[string(key)]
	p := rule.Partition(key, rule.Partitions)
	if k == nil || !l.owners.Load().mine[p] {
		return // returned or moved meanwhile; the shard has denied
	}
	never := v.Denied && v.Retry == math.MaxInt64
	admit, left, retry := k.Admit(cost, l.now().Mono, peek)
	if !l.alone() { // any more: what was waited for, or the process stood still
		admit, v.Unsure, retry = false, true, time.Second
	}
	if v.Admit, v.Denied, v.Left = admit || v.Shadow, !admit, left; !never {
		v.Retry = retry
	}
	if !admit && !peek {
		l.shards.at(p%shardCount, func(keys *table.Shard) { keys.Denied(key) })
	}
}

// reconcile looks at one key after the other.
func (l *leases) reconcile(context.Context) {
	l.mu.Lock()
	keys := slices.Collect(maps.Keys(l.keys)) // order: each by itself
	l.mu.Unlock()
	for _, key := range keys {
		l.tendOne(key)
	}
}

func (l *leases) tendOne(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.keys[key]
	if k == nil {
		return
	}
	now := l.now().Mono
	var contract tokenbucket.Share
	if !now.Before(l.quiet[rule.Partition(key, rule.Partitions)]) {
		l.shards.locked(key, func(keys *table.Shard) { contract = keys.Contract(key) })
	}
	if tokens, whole := k.Step(now, contract); whole {
		l.shards.locked(key, func(keys *table.Shard) { keys.Return(key, tokens, now) })
		delete(l.keys, key)
	}
}

func (l *leases) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.keys)
}
