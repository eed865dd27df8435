package controller

import (
	"context"
	"fmt"
	"slices"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// piece is the maximum number of assignments in a Change.
const piece = 5000

// Change is a message to a watcher.
type Change struct {
	Assignments []catalog.Assignment
	Epoch       uint64
	More        bool // more of the same change follows
}

// watcher only holds a wake-up. Changes before the next look share one wake-up, so a slow
// watcher costs nothing, and misses only outdated states.
type watcher struct {
	publishers []string      // set once; empty: all publishers of the topic
	wake       chan struct{} // 1 deep
}

// watched returns a function that reports whether a publisher of the topic is watched
// here.
func (t *topics) watched(topic string) func(publisher string) bool {
	ids := map[string]bool{}
	for w := range t.peek(topic).watchers {
		if len(w.publishers) == 0 {
			return func(string) bool { return true }
		}
		for _, id := range w.publishers {
			ids[id] = true
		}
	}
	return func(id string) bool { return ids[id] }
}

func (t *topics) wakeWatchers(topic string) {
	for w := range t.peek(topic).watchers {
		select {
		case w.wake <- struct{}{}:
		default: // a wake-up is already pending
		}
	}
}

// Resolve returns a publisher's broker. Errors: catalog.ErrTopicUnknown,
// ErrPublisherUnknown, ErrUnplaced, ErrNotActive, ErrUnread.
func (r *View) Resolve(topic, publisher string) (catalog.Assignment, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if err := r.knowledge.ready(); err != nil {
		return catalog.Assignment{}, err
	}
	a, err := r.cat.shown.Resolve(topic, publisher)
	return a, r.knowledge.deny(r.missing(topic, err))
}

// FindBrokers returns the connected brokers with a topic, by id. Errors about the topic
// are as in Resolve.
func (r *View) FindBrokers(topic string) ([]Node, error) {
	nodes, _, found := r.Producers(topic)
	r.mu.RLock()
	defer r.mu.RUnlock()
	if err := r.knowledge.ready(); err != nil {
		return nil, err
	}
	if !found {
		return nil, r.knowledge.deny(r.missing(topic, catalog.ErrTopicUnknown))
	}
	return nodes, nil
}

// Watch calls send with the present assignments of the named publishers (all if none is
// named), and then with every changed assignment, until the topic is deleted
// (catalog.ErrTopicUnknown), ctx ends or send fails. A slow send delays no other watcher,
// and skips intermediate states. Requires: the names are distinct.
func (r *View) Watch(ctx context.Context, topic string, publishers []string, send func(Change) error) error {
	w := &watcher{publishers: publishers, wake: make(chan struct{}, 1)}
	r.mu.Lock()
	if err := r.knowledge.ready(); err != nil {
		r.mu.Unlock()
		return err
	}
	first, known := r.cat.shown.Topic(topic)
	var err error
	switch {
	case !known:
		err = r.knowledge.deny(r.missing(topic, fmt.Errorf("topic %s: %w", topic, catalog.ErrTopicUnknown)))
	case first.State == catalog.Preparing || first.State == catalog.Deleting:
		err = fmt.Errorf("topic %s is %v: %w", topic, first.State, catalog.ErrNotActive)
	case r.knowledge.cut && len(publishers) > 0: // only a later stream can tell which are unknown
		publishers = slices.DeleteFunc(slices.Clone(publishers), func(id string) bool { return first.Placement.Of(id).Unknown })
		if len(publishers) == 0 {
			err = catalog.ErrUnread
		}
	}
	if err != nil {
		r.mu.Unlock()
		return err
	}
	l := r.topics.entry(topic)
	if l.watchers == nil {
		l.watchers = map[*watcher]struct{}{}
	}
	l.watchers[w] = struct{}{}
	ending := r.life.ending
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		l := r.topics.entry(topic)
		if delete(l.watchers, w); len(l.watchers) == 0 && r.knowledge.leader != nil {
			delete(r.topics.byName, topic) // a follower has no other data about the topic
		}
	}()

	var told *catalog.Placement
	for now := first; ; {
		if now.Placement != told {
			if err := difference(told, now.Placement, publishers, send); err != nil {
				return err
			}
			told = now.Placement
		}
		select {
		case <-w.wake:
		case <-ending:
			return ErrClosing
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		r.mu.RLock()
		now, known = r.cat.shown.Topic(topic)
		r.mu.RUnlock()
		if !known || now.State == catalog.Deleting || now.Ordered != first.Ordered {
			return fmt.Errorf("topic %s was deleted: %w", topic, catalog.ErrTopicUnknown)
		}
	}
}

// difference sends the assignments of now that differ from old. A nil old is empty.
// publishers selects assignments; empty: all.
func difference(old, now *catalog.Placement, publishers []string, send func(Change) error) error {
	count := len(publishers)
	if count == 0 {
		count = now.Len()
	}
	var batch []catalog.Assignment
	sent := false
	flush := func(more bool) error {
		sent = true
		err := send(Change{Assignments: batch, Epoch: now.Epoch(), More: more})
		batch = nil
		return err
	}
	for n := range count {
		var a catalog.Assignment
		if len(publishers) > 0 {
			a = now.Of(publishers[n])
		} else {
			a = now.At(n)
		}
		if old != nil {
			if was := old.Of(a.Publisher); was.Unknown == a.Unknown && was.Endpoint == a.Endpoint && was.Paced == a.Paced {
				continue
			}
		}
		if len(batch) == piece {
			if err := flush(true); err != nil {
				return err
			}
		}
		batch = append(batch, a)
	}
	if len(batch) > 0 || (old == nil && !sent) {
		return flush(false)
	}
	return nil
}
