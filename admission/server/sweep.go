package server

import (
	"context"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
)

// sweeper removes the credits of full keys from the store, so that the store does not grow without
// bound. A key without stored credits counts as full (or as full as a strict key can be), so removing
// them changes nothing. The goroutine that writes check-points owns the sweeper.
type sweeper struct {
	// Set once.
	store CreditStore
	rules *rules
	now   func() table.Now
	owned func() *[rule.Partitions]bool // partitions that this server decides now

	last string // last key that sweep looked at
	due  int    // stored keys that sweep has yet to look at: two for each saved key
}

const sweptAtOnce = 1000

// run looks at the keys that are due, and at one batch at least.
func (w *sweeper) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, storeDeadline)
	defer cancel()
	for {
		if err := w.sweep(ctx); err != nil {
			return err
		}
		if w.last == "" {
			w.due = 0
		}
		if w.due <= 0 {
			return nil
		}
	}
}

// sweep looks at the next keys in the store and removes the credits of the full keys among the owned
// partitions.
func (w *sweeper) sweep(ctx context.Context) error {
	saved, err := w.store.Saved(ctx, w.last, sweptAtOnce)
	if err != nil {
		return err
	}
	if w.last = ""; len(saved) == sweptAtOnce {
		w.last = saved[len(saved)-1].Key
	}
	var filled []table.Credit
	now, owned := w.now(), w.owned()
	w.rules.mu.RLock()
	for i := range saved {
		k := &saved[i]
		if !owned[rule.Partition(k.Key, rule.Partitions)] {
			continue
		}
		w.due--
		if !k.Own {
			k.Rule = w.rules.defaults.For(k.Key)
		}
		if table.Held(&k.Credit, &k.Rule, now) >= table.Held(nil, &k.Rule, now) {
			filled = append(filled, k.Credit)
		}
	}
	w.rules.mu.RUnlock()
	return w.store.Forget(ctx, filled)
}
