package server

import (
	"context"
	"errors"
	"strings"
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

func (l *lookups) init() {
	l.waiting = make(map[string][]pending)
	l.queue = make(chan string, maxLookups)
}

// add has a question wait for its key; false if there is no room.
func (l *lookups) add(key string, p pending) bool {
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
			s.lookUpOne(ctx, key, sealers)
		}
	}
}

func (s *Server) lookUpOne(ctx context.Context, key string, sealers map[*loop]*wire.Sealer) {
	limited, cancel := context.WithTimeout(ctx, lookupDeadline)
	full, err := s.learn(limited, key)
	cancel()
	if err != nil {
		s.metrics.lookupErrors.Inc()
	}
	if err != nil && !errors.Is(err, errNotPlaced) {
		s.cfg.Log.Warn("a key could not be looked up", "err", err)
	}
	for _, p := range s.lookups.take(key) {
		s.conclude(key, p, full, err, sealers[p.loop])
	}
}

// conclude answers a question whose key was looked up.
func (s *Server) conclude(key string, p pending, full bool, err error, sealer *wire.Sealer) {
	v, here := table.Verdict{Known: true, Default: true, Admit: s.cfg.AdmitFull, Denied: !s.cfg.AdmitFull}, true
	if !full && err == nil {
		v, here = s.decide([]byte(key), p.cost, s.cfg.Now().Mono, p.peek)
	}
	a := wire.Answer{Kind: wire.Busy, Session: p.asker.id, Number: p.number}
	if err != nil || !v.Known { // or evicted at once
		a = s.undecided([]byte(key), p.asker, a, here)
	} else {
		if full {
			s.metrics.full.Inc()
		}
		a = s.answer(&v, p.asker, p.number)
	}
	var buf [wire.AnswerSize]byte
	p.loop.conn.Send(sealer.AppendAnswer(buf[:0], a, p.keyID), p.from)
}

// learn brings a key from the store. full: there is no room for it.
//
// An edit of its rule that is followed between the store's answer and Learn finds no
// such key, and would be missed: if any was followed meanwhile, the store is asked
// again.
func (s *Server) learn(ctx context.Context, key string) (full bool, err error) {
	s.metrics.lookups.Inc()
	seen := s.change.Load()
	was := s.owners.Load().all[rule.Partition(key, rule.Partitions)]
	sent := s.replicas.held(key, was.Epoch) // before the store, where it may go meanwhile
	own, err := s.ownRule(ctx, key)
	if err != nil {
		return false, err
	}
	if own == nil { // an edit of the defaults counts at once for keys that are new
		last, err := s.cfg.Store.LastChange(ctx)
		if err == nil && last != seen {
			err = s.poll(ctx)
		}
		if err != nil {
			return false, err
		}
	}
	credit, err := s.cfg.Store.Credit(ctx, key)
	if err != nil {
		return false, err
	}
	switch placed, full := s.place(key, own, table.Newer(credit, sent), was); {
	case full:
		return true, nil
	case !placed:
		return false, errNotPlaced
	}
	for seen != s.change.Load() {
		seen = s.change.Load()
		if own, err = s.ownRule(ctx, key); err != nil {
			s.forget(key) // with a rule that may be an old one
			return false, err
		}
		s.followKey(key, own, seen)
	}
	return false, nil
}

// ownRule returns a key's rule, nil if it has none: a rule whose key ends in * is a
// default for the key of that name, too.
func (s *Server) ownRule(ctx context.Context, key string) (*rule.Rule, error) {
	if strings.HasSuffix(key, "*") {
		return nil, nil
	}
	r, err := s.cfg.Store.Rule(ctx, key)
	if errors.Is(err, store.ErrNoRule) {
		return nil, nil
	}
	return &r, err
}

// place puts a key into its shard, unless that is full, or the partition is not what it
// was when its credit was read, or another may still decide for the key. The defaults are held from
// the choice of one until the key is where their next change looks for it.
func (s *Server) place(key string, own *rule.Rule, credit *table.Credit, was store.Partition) (placed, full bool) {
	s.defaults.RLock()
	defer s.defaults.RUnlock()
	r := own
	if r == nil {
		d := s.defaults.rules.For(key)
		d.Change = s.defaults.change
		r = &d
	}
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
	r := own
	if r == nil {
		d := s.defaults.rules.For(key)
		d.Change = max(change, s.defaults.change)
		r = &d
	}
	sh := s.shard([]byte(key))
	sh.Lock()
	defer sh.Unlock()
	sh.keys.Follow(key, r, s.cfg.Now().Mono)
}

func (s *Server) forget(key string) {
	sh := s.shard([]byte(key))
	sh.Lock()
	defer sh.Unlock()
	sh.keys.Forget(key)
}
