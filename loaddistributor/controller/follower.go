package controller

import (
	"errors"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// A follower is a Controller that receives the events that the leader has committed. It
// answers from the catalog: topics, brokers, assignments of publishers, brokers of a
// topic. It has no sessions and no reports, and refuses all other requests with
// *NotLeaderError. Its answers lag by its connection to the store, normally by
// milliseconds. If it cannot read the store, it answers from the last state, and denies
// nothing: a missing topic may have been created.

// knowledge is how complete this process's catalog is. The controller's lock guards
// knowledge, and the caller of a method holds the lock for reading.
type knowledge struct {
	leader   func() string // set once; returns the leader's address; nil: not a follower
	unread   bool          // before the first Reset
	cut      bool          // the store cannot be read
	informed chan struct{} // closed and replaced when unread or cut changes
	empty    bool          // the catalog was empty at the start, and no topic was created since
	settled  time.Time     // if empty: until then no topic is denied; zero: no broker has joined
}

// NewFollower returns a follower without any data. leader returns the leader's address,
// to which callers are sent. leader must not block.
func NewFollower(cfg Config, adaptor Adaptor, leader func() string) (*Controller, error) {
	c, err := New(cfg, adaptor)
	if err != nil {
		return nil, err
	}
	c.knowledge.leader = leader
	c.cat.halted = ErrClosing
	c.knowledge.unread = true
	return c, nil
}

// Informed reports whether the catalog is up to date. changed is closed when that
// changes.
func (r *View) Informed() (now bool, changed <-chan struct{}) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return !r.knowledge.unread && !r.knowledge.cut, r.knowledge.informed
}

func (k *knowledge) inform(unread, cut bool) {
	k.unread, k.cut = unread, cut
	close(k.informed)
	k.informed = make(chan struct{})
}

// Ready returns catalog.ErrUnread for a follower that has received nothing yet: its
// catalog is empty, and missing topics may exist.
func (r *View) Ready() error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.knowledge.ready()
}

func (k *knowledge) ready() error {
	if k.unread {
		return catalog.ErrUnread
	}
	return nil
}

// deny returns err. If err says that something is unknown, but the follower cannot be
// sure, deny returns catalog.ErrUnread.
func (k *knowledge) deny(err error) error {
	if k.cut && (errors.Is(err, catalog.ErrTopicUnknown) || errors.Is(err, catalog.ErrPublisherUnknown)) {
		return catalog.ErrUnread
	}
	return err
}

// elsewhere returns *NotLeaderError on a follower that knows the leader.
func (k *knowledge) elsewhere() error {
	if k.leader == nil || k.leader() == "" {
		return nil
	}
	return k.following()
}

// following returns *NotLeaderError on a follower.
func (k *knowledge) following() error {
	if k.leader == nil {
		return nil
	}
	return &NotLeaderError{Leader: k.leader()}
}

// Elsewhere returns *NotLeaderError on a follower that knows the leader. It is for
// requests that a follower could answer only in part.
func (r *View) Elsewhere() error { return r.knowledge.elsewhere() }

// Reset replaces the catalog. Watchers must begin again.
func (c *Controller) Reset(cat *catalog.Catalog) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.knowledge.inform(false, false)
	c.cat.committed = cat
	close(c.life.ending)
	c.life.ending = make(chan struct{})
	c.cfg.Log.Info("following", obs.KeyVersion, cat.Version())
}

// Cut records that the store cannot be read, until the next Reset.
func (c *Controller) Cut(err error) {
	c.mu.Lock()
	first := !c.knowledge.cut
	if first {
		c.knowledge.inform(c.knowledge.unread, true)
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
	if _, err := c.announcer.apply(e); err != nil {
		return fmt.Errorf("follow: %w", err)
	}
	return nil
}
