package controller

import (
	"errors"
	"fmt"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// A follower is a Controller that is told what the leader has committed. It
// answers what can be answered from the catalog: topics, brokers, where a
// publisher belongs, who has a topic. It has no sessions, so no reports, and
// refuses everything else with *NotLeaderError. What it says is as old as its
// connection to the store, normally milliseconds. Cut off from the store it says
// what it knows, and denies nothing: what it does not know may have been created.

// followed is what a follower knows of its own knowledge (follower.go).
type followed struct {
	leader   func() string // set once, of a follower, who leads; nil: this one
	unread   bool          // before its first Reset
	cut      bool          // it cannot read the store any more
	informed chan struct{} // closed and replaced when either changes
}

// NewFollower returns a follower that knows nothing yet. leader says who leads,
// so that callers can be sent there; it must not wait.
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

// Informed reports whether there is a catalog to answer from that is up to date;
// changed is closed when that changes.
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

// Ready returns catalog.ErrUnread for a follower that was not told anything yet:
// its catalog is empty, and what is not in it may exist.
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

// deny returns err, or catalog.ErrUnread if it says that something is unknown and that is
// not known for sure.
func (f *followed) deny(err error) error {
	if f.cut && (errors.Is(err, catalog.ErrTopicUnknown) || errors.Is(err, catalog.ErrPublisherUnknown)) {
		return catalog.ErrUnread
	}
	return err
}

// elsewhere returns *NotLeaderError if this is a follower that knows who leads.
func (f *followed) elsewhere() error {
	if f.leader == nil || f.leader() == "" {
		return nil
	}
	return f.following()
}

// following says who leads if this is a follower.
func (f *followed) following() error {
	if f.leader == nil {
		return nil
	}
	return &NotLeaderError{Leader: f.leader()}
}

// Elsewhere returns *NotLeaderError if this is a follower that knows who leads: for
// what it could answer in part only.
func (r *reader) Elsewhere() error { return r.mu.elsewhere() }

// Reset takes the place of all that was known. Watchers have to begin
// anew.
func (c *Controller) Reset(cat *catalog.Catalog) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.inform(false, false)
	c.mu.cat = cat
	close(c.mu.ending)
	c.mu.ending = make(chan struct{})
	c.cfg.Log.Info("following", obs.KeyVersion, cat.Version())
}

// Cut takes the news that the store cannot be read, until the next Reset.
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

// Apply takes an event that the leader has committed.
func (c *Controller) Apply(e catalog.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.mu.apply(e); err != nil {
		return fmt.Errorf("follow: %w", err)
	}
	return nil
}
