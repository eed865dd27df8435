package controller

import (
	"errors"
	"fmt"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// A follower is a Controller that receives the events that the leader has committed. It
// answers from the catalog: topics, brokers, assignments of publishers, brokers of a
// topic. It has no sessions and no reports, and refuses all other requests with
// *NotLeaderError. Its answers lag by its connection to the store, normally by
// milliseconds. If it cannot read the store, it answers from the last state, and denies
// nothing: a missing topic may have been created.

// followed is the follower's state of knowledge (follower.go).
type followed struct {
	leader   func() string // set once; returns the leader's address; nil: not a follower
	unread   bool          // before the first Reset
	cut      bool          // the store cannot be read
	informed chan struct{} // closed and replaced when unread or cut changes
}

// NewFollower returns a follower without any data. leader returns the leader's address,
// to which callers are sent. leader must not block.
func NewFollower(cfg Config, adaptor Adaptor, leader func() string) (*Controller, error) {
	c, err := New(cfg, adaptor)
	if err != nil {
		return nil, err
	}
	c.mu.leader = leader
	c.mu.halted = ErrClosing
	c.mu.unread = true
	return c, nil
}

// Informed reports whether the catalog is up to date. changed is closed when that
// changes.
func (r *reader) Informed() (now bool, changed <-chan struct{}) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return !r.mu.unread && !r.mu.cut, r.mu.informed
}

func (f *followed) inform(unread, cut bool) {
	f.unread, f.cut = unread, cut
	close(f.informed)
	f.informed = make(chan struct{})
}

// Ready returns catalog.ErrUnread for a follower that has received nothing yet: its
// catalog is empty, and missing topics may exist.
func (r *reader) Ready() error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.mu.ready()
}

func (f *followed) ready() error {
	if f.unread {
		return catalog.ErrUnread
	}
	return nil
}

// deny returns err. If err says that something is unknown, but the follower cannot be
// sure, deny returns catalog.ErrUnread.
func (f *followed) deny(err error) error {
	if f.cut && (errors.Is(err, catalog.ErrTopicUnknown) || errors.Is(err, catalog.ErrPublisherUnknown)) {
		return catalog.ErrUnread
	}
	return err
}

// elsewhere returns *NotLeaderError on a follower that knows the leader.
func (f *followed) elsewhere() error {
	if f.leader == nil || f.leader() == "" {
		return nil
	}
	return f.following()
}

// following returns *NotLeaderError on a follower.
func (f *followed) following() error {
	if f.leader == nil {
		return nil
	}
	return &NotLeaderError{Leader: f.leader()}
}

// Elsewhere returns *NotLeaderError on a follower that knows the leader. It is for
// requests that a follower could answer only in part.
func (r *reader) Elsewhere() error { return r.mu.elsewhere() }

// Reset replaces the catalog. Watchers must begin again.
func (c *Controller) Reset(cat *catalog.Catalog) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.inform(false, false)
	c.mu.cat = cat
	close(c.mu.ending)
	c.mu.ending = make(chan struct{})
	c.cfg.Log.Info("following", obs.KeyVersion, cat.Version())
}

// Cut records that the store cannot be read, until the next Reset.
func (c *Controller) Cut(err error) {
	c.mu.Lock()
	first := !c.mu.cut
	if first {
		c.mu.inform(c.mu.unread, true)
	}
	c.mu.Unlock()
	if first {
		c.cfg.Log.Warn("the store cannot be read; not serving until it can", obs.KeyError, err)
	}
}

// Apply applies an event that the leader has committed.
func (c *Controller) Apply(e catalog.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.mu.apply(e); err != nil {
		return fmt.Errorf("follow: %w", err)
	}
	return nil
}
