package server

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/rawfd"
)

const (
	lookupWorkers  = 4
	maxLookups     = 4096 // keys being looked up
	maxPending     = 64   // questions that wait for one of them
	keysAtOnce     = 128  // that the store is asked for
	lookupDeadline = time.Second
)

// errNotPlaced says that a partition moved while its key was looked up, or that a strict
// key waits for the end of an earlier owner's lease.
var errNotPlaced = errors.New("not the owner, or not yet")

// pending is a question that waits for its key.
type pending struct {
	loop   *loop
	asker  *session
	from   rawfd.Address
	keyID  uint16
	number uint64
	cost   uint32
	peek   bool
}

// lookups are the keys that the store is asked for, each once.
type lookups struct {
	mu      sync.Mutex
	waiting map[string][]pending
	queue   chan string // keys of waiting that no worker has yet
}

// add has a question wait for its key; false if there is no room, or if the key is none,
// for which a store would fail, and the others that it is asked for with it.
func (l *lookups) add(key string, p pending) bool {
	if rule.ValidKey(key) != nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	questions, known := l.waiting[key]
	if !known && len(l.waiting) >= maxLookups || len(questions) >= maxPending {
		return false
	}
	l.waiting[key] = append(questions, p)
	if !known {
		l.queue <- key // has room: no more keys wait than it holds
	}
	return true
}

func (l *lookups) take(key string) []pending {
	l.mu.Lock()
	defer l.mu.Unlock()
	questions := l.waiting[key]
	delete(l.waiting, key)
	return questions
}

// next takes the key, and others of the queue, as many as the store is asked for at once.
func (l *lookups) next(key string) []*lookup {
	keys := []*lookup{{key: key}}
	for len(keys) < keysAtOnce {
		select {
		case key := <-l.queue:
			keys = append(keys, &lookup{key: key})
		default:
			return keys
		}
	}
	return keys
}

// lookup is of one key.
type lookup struct {
	key string
	was store.Partition // its
	own *rule.Rule      // nil: none, the default is its rule

	full bool // there is no room for it
	err  error
}

// lookUp is a worker.
func (s *Server) lookUp(ctx context.Context) {
	sealers := make(map[*loop]*wire.Sealer, len(s.loops))
	for _, l := range s.loops {
		sealers[l], _ = wire.NewSealer(s.cfg.Keys) // which were good at the start
	}
	for {
		select {
		case <-ctx.Done():
			return
		case key := <-s.lookups.queue:
			s.lookUpAll(ctx, s.lookups.next(key), sealers)
		}
	}
}

func (s *Server) lookUpAll(ctx context.Context, keys []*lookup, sealers map[*loop]*wire.Sealer) {
	limited, cancel := context.WithTimeout(ctx, lookupDeadline)
	s.learn(limited, keys)
	cancel()
	var failed error
	for _, k := range keys {
		if k.err != nil {
			s.metrics.lookupErrors.Inc()
		}
		if k.err != nil && !errors.Is(k.err, errNotPlaced) {
			failed = k.err
		}
		for _, p := range s.lookups.take(k.key) {
			s.conclude(k, p, sealers[p.loop])
		}
	}
	if failed != nil {
		s.cfg.Log.Warn("keys could not be looked up", "err", failed)
	}
}

// conclude answers a question whose key was looked up.
func (s *Server) conclude(k *lookup, p pending, sealer *wire.Sealer) {
	v, here := table.Verdict{Known: true, Default: true, Admit: s.cfg.AdmitFull, Denied: !s.cfg.AdmitFull}, true
	if !k.full && k.err == nil {
		v, here = s.decide([]byte(k.key), p.cost, s.cfg.Now().Mono, p.peek)
	}
	a := wire.Answer{Kind: wire.Busy, Session: p.asker.id, Number: p.number}
	if k.err != nil || !v.Known { // or evicted at once
		a = s.undecided([]byte(k.key), p.asker, a, here)
	} else {
		if k.full {
			s.metrics.full.Inc()
		}
		a = s.answer(&v, p.asker, p.number)
	}
	var buf [wire.AnswerSize]byte
	p.loop.conn.Send(sealer.AppendAnswer(buf[:0], a, p.keyID), p.from)
}

// learn brings keys from the store.
//
// An edit of a rule that is followed between the store's answer and Learn finds no
// such key, and would be missed: if any was followed meanwhile, the store is asked
// again.
func (s *Server) learn(ctx context.Context, keys []*lookup) {
	s.metrics.lookups.Add(float64(len(keys)))
	seen, owners := s.change.Load(), s.owners.Load()
	for _, k := range keys {
		k.was = owners.all[rule.Partition(k.key, rule.Partitions)]
	}
	credits, err := s.read(ctx, keys, seen)
	var placed []*lookup
	for _, k := range keys {
		if k.err = err; err != nil {
			continue
		}
		var saved *table.Credit
		if c, ok := credits[k.key]; ok {
			saved = &c
		}
		var here bool
		switch here, k.full = s.place(k.key, k.own, saved, k.was); {
		case here:
			placed = append(placed, k)
		case !k.full:
			k.err = errNotPlaced
		}
	}
	for len(placed) > 0 && seen != s.change.Load() {
		seen = s.change.Load()
		if err := s.ownRules(ctx, placed); err != nil {
			for _, k := range placed { // with a rule that may be an old one
				s.locked(k.key, func(keys *table.Shard) { keys.Forget(k.key) })
				k.err = err
			}
			return
		}
		for _, k := range placed {
			s.followKey(k.key, k.own, seen)
		}
	}
}

// read asks the store for the keys' own rules and for what they held.
func (s *Server) read(ctx context.Context, keys []*lookup, seen uint64) (map[string]table.Credit, error) {
	if err := s.ownRules(ctx, keys); err != nil {
		return nil, err
	}
	if slices.ContainsFunc(keys, func(k *lookup) bool { return k.own == nil }) {
		// An edit of the defaults counts at once for keys that are new.
		last, err := s.cfg.Store.LastChange(ctx)
		if err == nil && last != seen {
			err = s.poll(ctx)
		}
		if err != nil {
			return nil, err
		}
	}
	return s.cfg.Store.Credits(ctx, keysOf(keys))
}

// ownRules asks the store for the keys' own rules: one whose key ends in * is a default
// for the key of that name, too.
func (s *Server) ownRules(ctx context.Context, keys []*lookup) error {
	rules, err := s.cfg.Store.RulesOf(ctx, keysOf(keys))
	for _, k := range keys {
		k.own = nil
		if r, ok := rules[k.key]; ok && !r.Default() {
			k.own = &r
		}
	}
	return err
}

func keysOf(keys []*lookup) []string {
	all := make([]string, len(keys))
	for i, k := range keys {
		all[i] = k.key
	}
	return all
}

// place puts a key into its shard, unless that is full, or the partition is not what it
// was when its credit was read, or another may still decide for the key. The defaults are held from
// the choice of one until the key is where their next change looks for it.
func (s *Server) place(key string, own *rule.Rule, credit *table.Credit, was store.Partition) (placed, full bool) {
	s.defaults.RLock()
	defer s.defaults.RUnlock()
	r := s.ruleOf(key, own, 0)
	if credit != nil {
		s.advance(credit.At) // or what is written next would pass for older
	}
	now := s.now()
	if r.Strict && now.Wall < was.Lost {
		return false, false
	}
	if r.Strict && was.Lost != 0 && (credit == nil || credit.At < was.Lost) {
		credit = &table.Credit{Key: key, At: was.Lost}
	}
	from := now.Mono
	if r.Mode == rule.Lease {
		from, credit = s.leases.since(key, credit, now)
	}
	p := rule.Partition(key, rule.Partitions)
	sh := &s.shards[p%shards]
	sh.Lock()
	defer sh.Unlock()
	if t := s.owners.Load(); !t.mine[p] || t.all[p].Epoch != was.Epoch {
		return false, false
	}
	placed = sh.keys.Learn(key, r, table.Held(credit, r, now), from)
	return placed, !placed
}

// followKey brings a key to its own rule, or if that is nil to the default.
func (s *Server) followKey(key string, own *rule.Rule, change uint64) {
	s.defaults.RLock()
	defer s.defaults.RUnlock()
	r := s.ruleOf(key, own, change)
	s.locked(key, func(keys *table.Shard) { keys.Follow(key, r, s.cfg.Now().Mono) })
}

// ruleOf returns the key's own rule, or if that is nil the default, as of a change or a later
// one. Requires: defaults held.
func (s *Server) ruleOf(key string, own *rule.Rule, change uint64) *rule.Rule {
	if own != nil {
		return own
	}
	d := s.defaults.rules.For(key)
	d.Change = max(change, s.defaults.change)
	return &d
}
