package server

import (
	"context"
	"maps"
	"math"
	"slices"
	"sync"
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
func (s *Server) grant(q *wire.Question) (a wire.Answer, g wire.Grant, ok bool) {
	v, _ := s.decide(q.Key, 0, s.cfg.Now().Mono, true)
	if !v.Leased {
		return a, g, false
	}
	p := rule.Partition(q.Key, rule.Partitions)
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	now := s.cfg.Now()
	quiet := s.leases.quiet[p]
	if !s.owners.Load().mine[p] || !s.alone() || now.Mono.Before(quiet.Add(-lease.Quiet)) {
		return a, g, false
	}
	k := s.leases.keys[string(q.Key)]
	if k == nil {
		if len(s.leases.keys) >= maxLeased {
			return a, g, false
		}
		var contract tokenbucket.Share
		var credits tokenbucket.Tokens
		var known bool
		s.shards.locked(string(q.Key), func(keys *table.Shard) { contract, credits, known = keys.Lend(q.Key, now.Mono) })
		if !known {
			return a, g, false
		}
		if now.Mono.Before(quiet) {
			contract = tokenbucket.Share{}
		}
		k = lease.New(now.Mono, uint64(s.now().Wall), string(q.Key), contract, credits)
		s.leases.keys[string(q.Key)] = k
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

// decideLent corrects a verdict by what the owner holds of the key.
func (s *Server) decideLent(key []byte, cost int64, peek bool, v *table.Verdict) {
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	k := s.leases.keys[string(key)]
	p := rule.Partition(key, rule.Partitions)
	if k == nil || !s.owners.Load().mine[p] {
		return // returned or moved meanwhile; the shard has denied
	}
	never := v.Denied && v.Retry == math.MaxInt64
	admit, left, retry := k.Admit(cost, s.cfg.Now().Mono, peek)
	if !s.alone() { // any more: what was waited for, or the process stood still
		admit, v.Unsure, retry = false, true, time.Second
	}
	if v.Admit, v.Denied, v.Left = admit || v.Shadow, !admit, left; !never {
		v.Retry = retry
	}
	if !admit && !peek {
		s.shards.at(p%shardCount, func(keys *table.Shard) { keys.Denied(key) })
	}
}

// tendLeases looks at one key after the other.
func (s *Server) tendLeases(context.Context) {
	s.leases.mu.Lock()
	keys := slices.Collect(maps.Keys(s.leases.keys)) // order: each by itself
	s.leases.mu.Unlock()
	for _, key := range keys {
		s.tendLease(key)
	}
}

func (s *Server) tendLease(key string) {
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	k := s.leases.keys[key]
	if k == nil {
		return
	}
	now := s.cfg.Now().Mono
	var contract tokenbucket.Share
	if !now.Before(s.leases.quiet[rule.Partition(key, rule.Partitions)]) {
		s.shards.locked(key, func(keys *table.Shard) { contract = keys.Contract(key) })
	}
	if tokens, whole := k.Step(now, contract); whole {
		s.shards.locked(key, func(keys *table.Shard) { keys.Return(key, tokens, now) })
		delete(s.leases.keys, key)
	}
}

func (l *leases) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.keys)
}
