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
	slotsAtOnce   = 4096 // slots looked at under one lock
	creditsAtOnce = 2000 // maximum; each failure to save halves the batch
	sweptAtOnce   = 1000
	// storeDeadline limits a request to a store that does not answer, for example behind a cut network.
	// A check-point, a renewal and the next renewal together take less than a lease.
	storeDeadline = 1500 * time.Millisecond
)

// repeat calls f each period, and whenever wake receives, until ctx ends.
func repeat(ctx context.Context, period time.Duration, wake <-chan struct{}, f func(context.Context)) {
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

// follow applies edits of rules to the keys in memory.
func (s *Server) follow(ctx context.Context) {
	err := s.rules.poll(ctx)
	if ctx.Err() != nil {
		return
	}
	if s.outages.polls.Note(err); err != nil {
		s.metrics.pollErrors.Inc()
	}
}

// maintain makes a check-point, then sweeps the store.
func (s *Server) maintain(ctx context.Context) {
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

// sweepAll looks at two keys in the store for each saved key, and at one batch at least, so that the
// store does not grow without bound.
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

// sweep looks at the next keys in the store and removes the credits of full keys. A key without stored
// credits counts as full (or as full as a strict key can be), so removing them changes nothing.
func (s *Server) sweep(ctx context.Context) error {
	saved, err := s.cfg.Store.Saved(ctx, s.swept, sweptAtOnce)
	if err != nil {
		return err
	}
	if s.swept = ""; len(saved) == sweptAtOnce {
		s.swept = saved[len(saved)-1].Key
	}
	var filled []table.Credit
	now, owned := s.now(), &s.owners.Load().owned
	s.rules.mu.RLock()
	for i := range saved {
		k := &saved[i]
		if !owned[rule.Partition(k.Key, rule.Partitions)] {
			continue
		}
		s.unswept--
		if !k.Own {
			k.Rule = s.rules.defaults.For(k.Key)
		}
		if table.Held(&k.Credit, &k.Rule, now) >= table.Held(nil, &k.Rule, now) {
			filled = append(filled, k.Credit)
		}
	}
	s.rules.mu.RUnlock()
	return s.cfg.Store.Forget(ctx, filled)
}

// checkpoint saves all credits that changed since the last check-point. Credits that could not be saved
// count as changed again. Each batch may take limit; between batches the lease can be renewed.
func (s *Server) checkpoint(ctx context.Context, limit time.Duration) error {
	start := s.now().Wall.Milliseconds()
	for at := (cursor{}); at.shard < shardCount; {
		if err := s.saveBatch(ctx, limit, &at); err != nil {
			return err
		}
	}
	s.saved.Store(int64(s.cfg.Now().Mono))
	s.savedTo.Store(start)
	return nil
}

func (s *Server) saveBatch(ctx context.Context, limit time.Duration, at *cursor) error {
	s.saving.Lock()
	defer s.saving.Unlock()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return s.sendChanges(table.Saver, s.batch, at, func(t *owners, credits []table.Credit) error {
		err := s.save(ctx, t, credits)
		if err == nil {
			s.metrics.savedCredits.Add(float64(len(credits)))
			s.unswept += 2 * len(credits)
		}
		return err
	})
}

// save writes credits to the store under the owner table t. If the write fails, the next batch is half
// as large, because the write may have been too slow. If the owners have changed, save reads them and
// returns store.ErrMoved. Requires: saving held.
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

// State is the content of /debug/state.
type State struct {
	Keys       int            `json:"keys"`
	Partitions int64          `json:"partitions"` // owned by this server
	Change     uint64         `json:"change"`     // last applied edit of a rule
	Polled     string         `json:"polled"`     // time since the last poll for edits
	Saved      string         `json:"checkpoint"` // time since the last check-point
	Follower   string         `json:"follower"`   // receives this server's changed credits
	Lag        float64        `json:"lag"`        // seconds since the follower last had all changes
	MostDenied []table.Denied `json:"most_denied"`
}

// State visits each key, shard by shard.
func (s *Server) State() State {
	now := s.cfg.Now().Mono
	ago := func(at int64) string { return now.Sub(mono.Time(at)).Round(time.Millisecond).String() }
	state := State{Keys: s.shards.len(), Partitions: s.ownedPartitions.Load(), Change: s.rules.followed.Load(), Polled: ago(s.rules.polled.Load()), Saved: ago(s.saved.Load())}
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
