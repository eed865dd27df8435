package server

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/mono"
)

const (
	changesAtOnce = 1000
	slotsAtOnce   = 4096 // that are looked at while a shard is locked
	creditsAtOnce = 2000 // at most: half as many each time that they cannot be saved
	sweptAtOnce   = 1000
	// storeDeadline ends an exchange with a store that does not answer, as one behind a
	// cut network does, so that the lease can be renewed meanwhile: a check-point, a
	// renewal and the next one take less than a lease.
	storeDeadline = 1500 * time.Millisecond
)

// every calls f each period, and when it is woken, until ctx ends.
func every(ctx context.Context, period time.Duration, wake <-chan struct{}, f func(context.Context)) {
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-wake:
		}
		f(ctx)
	}
}

// follow brings edits of rules to the keys that are here.
func (s *Server) follow(ctx context.Context) {
	err := s.rules.poll(ctx)
	if ctx.Err() != nil {
		return
	}
	if s.outages.polls.Note(err); err != nil {
		s.metrics.pollErrors.Inc()
	}
}

// keep saves what keys hold.
func (s *Server) keep(ctx context.Context) {
	err := s.checkpoint(ctx, storeDeadline)
	if ctx.Err() != nil {
		return
	}
	if s.outages.checkpoints.Note(err); err != nil {
		s.metrics.saveErrors.Inc()
		return
	}
	if err = s.sweepAll(ctx); ctx.Err() == nil {
		s.outages.sweeps.Note(err)
	}
}

// sweepAll looks at two keys in the store for each that was saved, and at some if none was, so that
// the store does not grow for ever.
func (s *Server) sweepAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, storeDeadline)
	defer cancel()
	for {
		if err := s.sweep(ctx); err != nil {
			return err
		}
		if s.swept == "" {
			s.unswept = 0
		}
		if s.unswept <= 0 {
			return nil
		}
	}
}

// sweep forgets the credits of keys that are full, of the next some in the store: a key
// that was never saved is full, too, or a strict one as full as it can be.
func (s *Server) sweep(ctx context.Context) error {
	saved, err := s.cfg.Store.Saved(ctx, s.swept, sweptAtOnce)
	if err != nil {
		return err
	}
	if s.swept = ""; len(saved) == sweptAtOnce {
		s.swept = saved[len(saved)-1].Key
	}
	var full []table.Credit
	now, mine := s.now(), &s.owners.Load().mine
	s.rules.mu.RLock()
	for i := range saved {
		k := &saved[i]
		if !mine[rule.Partition(k.Key, rule.Partitions)] {
			continue
		}
		s.unswept--
		if !k.Own {
			k.Rule = s.rules.defaults.For(k.Key)
		}
		if table.Held(&k.Credit, &k.Rule, now) >= table.Held(nil, &k.Rule, now) {
			full = append(full, k.Credit)
		}
	}
	s.rules.mu.RUnlock()
	return s.cfg.Store.Forget(ctx, full)
}

// checkpoint saves all that changed since the last one. What could not be saved counts
// as changed again. A batch has so much time; between them the lease can be renewed.
func (s *Server) checkpoint(ctx context.Context, limit time.Duration) error {
	began := s.now().Wall.Milliseconds()
	for at := (cursor{}); at.shard < shardCount; {
		if err := s.saveBatch(ctx, limit, &at); err != nil {
			return err
		}
	}
	s.saved.Store(int64(s.cfg.Now().Mono))
	s.savedTo.Store(began)
	return nil
}

func (s *Server) saveBatch(ctx context.Context, limit time.Duration, at *cursor) error {
	s.saving.Lock()
	defer s.saving.Unlock()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return s.tell(table.Saver, s.batch, at, func(t *owners, credits []table.Credit) error {
		err := s.save(ctx, t, credits)
		if err == nil {
			s.metrics.savedCredits.Add(float64(len(credits)))
			s.unswept += 2 * len(credits)
		}
		return err
	})
}

// save saves what keys hold, by a table of owners. The next batch is half as large if that fails,
// since it may have taken too long. Where the owners have changed it reads them. Error:
// store.ErrMoved. Requires: saving held.
func (s *Server) save(ctx context.Context, t *owners, credits []table.Credit) error {
	if len(credits) == 0 {
		return nil
	}
	err := s.cfg.Store.SaveCredits(ctx, s.me, t.number, credits)
	switch {
	case err == nil:
		s.me.Beat++
		s.batch = min(creditsAtOnce, 2*s.batch)
	case errors.Is(err, store.ErrFenced):
		s.wakeUp()
	case errors.Is(err, store.ErrMoved):
		return cmp.Or(s.readOwners(ctx), err)
	default:
		s.batch = max(1, s.batch/2)
	}
	return err
}

// State is what /debug/state shows.
type State struct {
	Keys       int            `json:"keys"`
	Partitions int64          `json:"partitions"` // that this server owns
	Change     uint64         `json:"change"`     // the last edit of a rule that is followed
	Polled     string         `json:"polled"`     // how long ago edits were looked for
	Saved      string         `json:"checkpoint"` // how long ago
	Follower   string         `json:"follower"`   // what changes is replicated to it
	Lag        float64        `json:"lag"`        // seconds since that last had all
	MostDenied []table.Denied `json:"most_denied"`
}

// State looks at each key, shard by shard.
func (s *Server) State() State {
	now := s.cfg.Now().Mono
	ago := func(at int64) string { return now.Sub(mono.Time(at)).Round(time.Millisecond).String() }
	state := State{Keys: s.shards.len(), Partitions: s.held.Load(), Change: s.rules.followed.Load(), Polled: ago(s.rules.polled.Load()), Saved: ago(s.saved.Load())}
	s.replicas.mu.Lock()
	state.Lag = now.Sub(mono.Time(s.replicated.Load())).Seconds()
	state.Follower = s.replicas.follower.Address
	s.replicas.mu.Unlock()
	s.shards.allInTurns(func(keys *table.Shard, from int32) (next int32) {
		state.MostDenied, next = keys.MostDenied(state.MostDenied, 20, from, slotsAtOnce)
		return next
	})
	return state
}
