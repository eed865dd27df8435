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
	maxLookups    = 4096 // keys
	maxPending    = 64   // questions per key
	keysAtOnce    = 128  // keys per request to the store
)

// errNotPlaced means that the partition moved during the lookup, or that an earlier owner's lease still
// covers a strict key.
var errNotPlaced = errors.New("not the owner, or not yet")

// pending is a question that waits for the lookup of its key.
type pending struct {
	loop     *loop
	asker    *session
	client   rawfd.Address
	keyID    uint16
	number   uint64
	cost     uint32
	peek     bool
	deadline mono.Time // deadline for a decision
	denied   mono.Time // earliest time at which the asker denies the request itself
}

// lookups holds the keys being looked up, each once.
type lookups struct {
	mu      sync.Mutex
	waiting map[string][]pending
	queue   chan string // keys of waiting that no worker has taken yet
}

// added is the result of lookups.add.
type added int

const (
	waits  added = iota
	noRoom       // too many questions or keys wait; the key may be among them
	noKey        // invalid key: the store would refuse the whole request that contains it
)

// add queues a question until its key is looked up.
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
		l.queue <- key // never blocks: queue holds maxLookups keys
	}
	return waits
}

func (l *lookups) remove(key string) []pending {
	l.mu.Lock()
	defer l.mu.Unlock()
	questions := l.waiting[key]
	delete(l.waiting, key)
	return questions
}

// next returns key and up to keysAtOnce-1 more keys from the queue.
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

type lookup struct {
	key  string
	rule *rule.Rule // the key's own rule; nil: a default applies

	noRoom bool // the shard has no room for the key
	err    error
}

// lookUp runs one lookup worker.
func (s *Server) lookUp(ctx context.Context) {
	sealer, _ := wire.NewSealer(s.cfg.Keys) // New has checked the keys
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
		for _, p := range s.lookups.remove(k.key) {
			s.conclude(k, p, sealer)
		}
	}
	if ctx.Err() == nil {
		s.outages.lookups.Note(failed)
	}
}

// conclude answers a question whose key was looked up. If the question is past its deadline, conclude
// does not decide it.
func (s *Server) conclude(k *lookup, p pending, sealer *wire.Sealer) {
	v, owned, charged := table.Verdict{}, true, uint32(0)
	now := s.cfg.Now().Mono
	switch {
	case k.err != nil:
	case p.deadline.Before(now):
		s.metrics.expired.Inc()
		if p.denied.Before(now) { // no late copy of the question may be decided either
			p.asker.mu.Lock()
			p.asker.answers.Replace(p.number, answered{kind: wire.Busy})
			p.asker.mu.Unlock()
		}
	case k.noRoom:
		v = table.Verdict{Known: true, Default: true, Admit: s.cfg.AdmitFull, Denied: !s.cfg.AdmitFull, Full: math.MaxInt64}
		s.metrics.noRoom.Inc()
	default:
		v, owned = s.decide([]byte(k.key), p.cost, now, p.peek) // the key may have been evicted at once; then v.Known is false
		charged = chargeOf(&v, p.cost, p.peek)
	}
	a := s.answer([]byte(k.key), p.asker, p.number, &v, owned, charged, now)
	var buf [wire.AnswerSize]byte
	p.loop.conn.Send(sealer.AppendAnswer(buf[:0], a, p.keyID), p.client)
}

// learn reads the rules and credits of keys from the store and places the keys in their shards.
func (s *Server) learn(ctx context.Context, keys []*lookup) {
	s.metrics.lookups.Add(float64(len(keys)))
	names, owners := make([]string, len(keys)), s.owners.Load()
	for i, k := range keys {
		names[i] = k.key
	}
	last, err := s.cfg.Store.LastChange(ctx)
	if err == nil && last != s.rules.followed.Load() { // an edit of a default rule applies at once to new keys
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
		s.rules.mu.RUnlock() // an edit was followed meanwhile; the rules read may be stale. Retry until ctx ends.
	}
	defer s.rules.mu.RUnlock()
	for _, k := range keys {
		if k.err = err; err != nil {
			continue
		}
		if r, ok := rules[k.key]; ok && !r.Default() { // a default rule may have the same name as the key
			k.rule = &r
		}
		var credit *table.Credit
		if c, ok := credits[k.key]; ok {
			credit = &c
		}
		s.place(k, credit, owners)
	}
}

// place puts a key into its shard. If the shard is full, place sets k.noRoom. If the partition has
// changed since the credit was read, or an earlier owner may still decide for the key, place sets k.err
// to errNotPlaced. Requires: rules.mu held.
func (s *Server) place(k *lookup, credit *table.Credit, before *owners) {
	r := s.rules.effective(k.key, k.rule, 0)
	p := rule.Partition(k.key, rule.Partitions)
	previous := before.all[p]
	if credit != nil {
		s.advance(credit.At) // otherwise this server's next check-point would look older than credit
	}
	now := s.now()
	if r.Strict && now.Wall < previous.Lost {
		k.err = errNotPlaced
		return
	}
	if r.Strict && previous.Lost != 0 && (credit == nil || credit.At < previous.Lost) {
		credit = &table.Credit{Key: k.key, At: previous.Lost} // empty at that time, whatever the store has from before
	}
	s.shards.each(p%shardCount, func(keys *table.Shard) {
		if t := s.owners.Load(); t.owned[p] && t.all[p].Epoch == previous.Epoch && t.instance == before.instance {
			k.noRoom = !keys.Learn(k.key, r, table.Held(credit, r, now), now.Mono)
		} else {
			k.err = errNotPlaced
		}
	})
}
