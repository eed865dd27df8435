package server

import (
	"context"
	"errors"
	"math"
	"sync"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/rawfd"
)

const (
	lookupWorkers = 4
	maxLookups    = 4096 // keys being looked up
	maxPending    = 64   // questions that wait for one of them
	keysAtOnce    = 128  // that the store is asked for
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
	until  mono.Time // it is not decided after that
	denied mono.Time // when the asker denies it, at least until
}

// lookups are the keys that the store is asked for, each once.
type lookups struct {
	mu      sync.Mutex
	waiting map[string][]pending
	queue   chan string // keys of waiting that no worker has yet
}

// added says what came of lookups.add.
type added int

const (
	waits  added = iota
	noRoom       // the key is looked up, or others are; too many questions wait
	noKey        // not a valid key: a store would refuse it, and the keys that it is asked for with it
)

// add has a question wait for its key.
func (l *lookups) add(key string, p pending) added {
	if rule.ValidKey(key) != nil {
		return noKey
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	questions, known := l.waiting[key]
	if !known && len(l.waiting) >= maxLookups || len(questions) >= maxPending {
		return noRoom
	}
	l.waiting[key] = append(questions, p)
	if !known {
		l.queue <- key // has room: no more keys wait than it holds
	}
	return waits
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
	own *rule.Rule // nil: none, the default is its rule

	full bool // there is no room for it
	err  error
}

// lookUp is a worker.
func (s *Server) lookUp(ctx context.Context) {
	sealer, _ := wire.NewSealer(s.cfg.Keys) // which were good at the start
	for {
		select {
		case <-ctx.Done():
			return
		case key := <-s.lookups.queue:
			s.lookUpAll(ctx, s.lookups.next(key), sealer)
		}
	}
}

func (s *Server) lookUpAll(ctx context.Context, keys []*lookup, sealer *wire.Sealer) {
	limited, cancel := context.WithTimeout(ctx, s.cfg.Lookup)
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
			s.conclude(k, p, sealer)
		}
	}
	if ctx.Err() == nil {
		s.outages.lookups.Note(failed)
	}
}

// conclude answers a question whose key was looked up. It decides nothing that the asker has
// denied meanwhile.
func (s *Server) conclude(k *lookup, p pending, sealer *wire.Sealer) {
	v, here, charged := table.Verdict{}, true, uint32(0)
	now := s.cfg.Now().Mono
	switch {
	case k.err != nil:
	case p.until.Before(now):
		s.metrics.late.Inc()
		if p.denied.Before(now) { // nor is a copy that comes yet
			p.asker.mu.Lock()
			p.asker.answers.Replace(p.number, answered{kind: wire.Busy})
			p.asker.mu.Unlock()
		}
	case k.full:
		v = table.Verdict{Known: true, Default: true, Admit: s.cfg.AdmitFull, Denied: !s.cfg.AdmitFull, Full: math.MaxInt64}
		s.metrics.full.Inc()
	default:
		v, here = s.decide([]byte(k.key), p.cost, now, p.peek) // or it was evicted at once
		charged = chargeOf(&v, p.cost, p.peek)
	}
	a := s.answer([]byte(k.key), p.asker, p.number, &v, here, charged, now)
	var buf [wire.AnswerSize]byte
	p.loop.conn.Send(sealer.AppendAnswer(buf[:0], a, p.keyID), p.from)
}

// learn brings keys from the store.
func (s *Server) learn(ctx context.Context, keys []*lookup) {
	s.metrics.lookups.Add(float64(len(keys)))
	names, owners := make([]string, len(keys)), s.owners.Load()
	for i, k := range keys {
		names[i] = k.key
	}
	last, err := s.cfg.Store.LastChange(ctx)
	if err == nil && last != s.rules.followed.Load() { // an edit of the defaults counts at once for keys that are new
		err = s.rules.poll(ctx)
	}
	var rules map[string]rule.Rule
	var credits map[string]table.Credit
	for {
		change := s.rules.followed.Load()
		if err == nil {
			rules, err = s.cfg.Store.RulesOf(ctx, names)
		}
		if err == nil {
			credits, err = s.cfg.Store.Credits(ctx, names)
		}
		s.rules.mu.RLock()
		if err != nil || s.rules.followed.Load() == change {
			break
		}
		s.rules.mu.RUnlock() // an edit was followed meanwhile, and what was read may be older: again, until ctx ends
	}
	defer s.rules.mu.RUnlock()
	for _, k := range keys {
		if k.err = err; err != nil {
			continue
		}
		if r, ok := rules[k.key]; ok && !r.Default() { // which is a default for the key of that name, too
			k.own = &r
		}
		var credit *table.Credit
		if c, ok := credits[k.key]; ok {
			credit = &c
		}
		s.place(k, credit, owners)
	}
}

// place puts a key into its shard, unless that is full, or the partition is not what it
// was before its credit was read, or another may still decide for the key. Requires: rules.mu held.
func (s *Server) place(k *lookup, credit *table.Credit, before *owners) {
	r := s.rules.of(k.key, k.own, 0)
	p := rule.Partition(k.key, rule.Partitions)
	was := before.all[p]
	if credit != nil {
		s.advance(credit.At) // or what is written next would pass for older
	}
	now := s.now()
	if r.Strict && now.Wall < was.Lost {
		k.err = errNotPlaced
		return
	}
	if r.Strict && was.Lost != 0 && (credit == nil || credit.At < was.Lost) {
		credit = &table.Credit{Key: k.key, At: was.Lost} // held nothing then, whatever is stored of before
	}
	s.shards.at(p%shardCount, func(keys *table.Shard) {
		if t := s.owners.Load(); t.mine[p] && t.all[p].Epoch == was.Epoch && t.instance == before.instance {
			k.full = !keys.Learn(k.key, r, table.Held(credit, r, now), now.Mono)
		} else {
			k.err = errNotPlaced
		}
	})
}
