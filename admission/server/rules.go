package server

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/obs"
)

// rules holds the default rules, and the number of the last edit that was applied.
type rules struct {
	// set once
	store  RuleStore
	shards *shards
	now    func() table.Now
	edited func() // called after edits were applied

	polling  sync.Mutex    // taken before mu
	followed atomic.Uint64 // number of the last applied edit; written under mu
	polled   atomic.Int64  // mono.Time of the last successful poll

	// mu guards the fields below. A lookup holds mu for reading while it places keys whose rules are as
	// of followed, so that later edits reach these keys too. mu is not held during requests to the
	// store, which may be slow.
	mu       sync.RWMutex
	defaults rule.Defaults
	change   uint64 // number of the last edit of a default
}

// follow applies edits of rules to the keys in memory, and notes and counts failures.
func (r *rules) follow(ctx context.Context, outage *obs.Outage, failures prometheus.Counter) {
	err := r.poll(ctx)
	if ctx.Err() != nil {
		return
	}
	if outage.Note(err); err != nil {
		failures.Inc()
	}
}

// read reads the defaults from the store and discards the previous ones.
func (r *rules) read(ctx context.Context) error {
	r.polling.Lock()
	defer r.polling.Unlock()
	// Read the number first: an edit between the two reads is then applied twice, not lost.
	change, err := r.store.LastChange(ctx)
	if err != nil {
		return err
	}
	defaults, err := r.store.Defaults(ctx)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.defaults, r.change = rule.Defaults{}, 0
	for _, d := range defaults {
		r.defaults.Set(d)
	}
	r.followed.Store(change)
	return nil
}

// poll applies all edits that the store has after followed. The poller and the lookups call it; polling
// lets one at a time in.
func (r *rules) poll(ctx context.Context) error {
	r.polling.Lock()
	defer r.polling.Unlock()
	for {
		limited, cancel := context.WithTimeout(ctx, storeDeadline)
		changes, err := r.store.Changes(limited, r.followed.Load(), changesAtOnce)
		cancel()
		if err != nil {
			return err
		}
		if r.followEdits(changes); len(changes) > 0 {
			r.edited() // renews: the heartbeat then shows if the store is restored to a copy from before the edits
		}
		if len(changes) < changesAtOnce {
			r.polled.Store(int64(r.now().Mono))
			return nil
		}
	}
}

// followEdits applies edits. Requires: polling held, so that nothing else changes the defaults.
func (r *rules) followEdits(changes []store.Change) {
	defaults := false
	r.mu.Lock()
	for i := range changes {
		edit := &changes[i].Rule
		r.followed.Store(edit.Change)
		if edit.Default() {
			defaults = true
			r.change = edit.Change
			if changes[i].Deleted {
				r.defaults.Delete(edit.Key)
			} else {
				r.defaults.Set(*edit)
			}
			continue
		}
		own := edit
		if changes[i].Deleted {
			own = nil
		}
		r.shards.locked(edit.Key, func(keys *table.Shard) { keys.Follow(edit.Key, r.effective(edit.Key, own, edit.Change), r.now().Mono) })
	}
	r.mu.Unlock()
	if defaults { // keys that are placed from now on already have the new defaults
		r.shards.allInTurns(func(keys *table.Shard, from int32) int32 {
			return keys.Undefault(&r.defaults, r.change, from, slotsAtOnce, r.now().Mono)
		})
	}
}

// effective returns own, or the key's default if own is nil. The default's Change is at least change.
// Requires: mu held.
func (r *rules) effective(key string, own *rule.Rule, change uint64) *rule.Rule {
	if own != nil {
		return own
	}
	d := r.defaults.For(key)
	d.Change = max(change, r.change)
	return &d
}
