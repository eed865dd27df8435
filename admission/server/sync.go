package server

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/mono"
)

const (
	changesAtOnce = 1000
	slotsAtOnce   = 4096 // slots looked at under one lock
	creditsAtOnce = 2000 // maximum; each failure to save halves the batch
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
	if err = s.sweeper.run(ctx); ctx.Err() == nil {
		s.outages.sweeps.Note(err)
	}
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
			s.sweeper.due += 2 * len(credits)
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
		s.me.Heartbeat++
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
