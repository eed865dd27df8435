package server

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
)

// rules are the defaults, and how far edits are followed.
type rules struct {
	// set once
	store  Store
	shards *shards
	now    func() table.Now
	edited func() // called after edits were followed

	polling  sync.Mutex    // taken before mu
	followed atomic.Uint64 // the last edit that is
	polled   atomic.Int64  // when edits were last looked for with success, mono.Time

	// mu guards the defaults, and followed is written under it. A lookup holds it (read) while it
	// puts keys here whose rules are as of followed: an edit after that is followed by them, too.
	// It is not held while the store is asked, which may take as long as it does.
	mu       sync.RWMutex
	defaults rule.Defaults
	change   uint64 // when they last changed
}

// read begins anew: nothing that was read of rules before counts.
func (r *rules) read(ctx context.Context) error {
	r.polling.Lock()
	defer r.polling.Unlock()
	// The number first: an edit that comes between is read, and read again.
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

// poll is done by one at a time: the follower, and lookups that see that an edit is not
// followed yet.
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
			r.edited() // a beat, so that to a copy from before them the store cannot be put back unnoticed
		}
		if len(changes) < changesAtOnce {
			r.polled.Store(int64(r.now().Mono))
			return nil
		}
	}
}

// followEdits requires polling held: nothing else changes the defaults.
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
		r.shards.locked(edit.Key, func(keys *table.Shard) { keys.Follow(edit.Key, r.of(edit.Key, own, edit.Change), r.now().Mono) })
	}
	r.mu.Unlock()
	if defaults { // those that are new by then have the new ones
		r.shards.allInTurns(func(keys *table.Shard, from int32) int32 {
			return keys.Undefault(&r.defaults, r.change, from, slotsAtOnce, r.now().Mono)
		})
	}
}

// of returns the key's own rule, or if that is nil the default, as of a change or a later
// one. Requires: mu held.
func (r *rules) of(key string, own *rule.Rule, change uint64) *rule.Rule {
	if own != nil {
		return own
	}
	d := r.defaults.For(key)
	d.Change = max(change, r.change)
	return &d
}
