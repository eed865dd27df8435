package controller

import (
	"fmt"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// A follower is a Controller that is told what the leader has committed. It
// answers what can be answered from the catalog: topics, brokers, where a
// publisher belongs, who has a topic. It has no sessions, so no figures, and
// refuses everything else with *NotLeaderError. What it says is as old as its
// connection to the store, normally milliseconds.

// NewFollower returns a follower that knows nothing yet. leader says who leads,
// for whoever has to be sent there; it must not wait.
func NewFollower(cfg Config, adaptor Adaptor, leader func() string) (*Controller, error) {
	c, err := New(cfg, adaptor)
	if err != nil {
		return nil, err
	}
	c.leader = leader
	c.informed = make(chan struct{})
	c.mu.halted = ErrClosing
	c.mu.unread = true
	return c, nil
}

// Informed is closed once Ready has no error.
func (c *Controller) Informed() <-chan struct{} { return c.informed }

// Ready returns catalog.ErrUnread for a follower that was not told anything yet:
// its catalog is empty, and what is not in it may exist.
func (c *Controller) Ready() error {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.readyLocked()
}

// readyLocked requires mu held.
func (c *Controller) readyLocked() error {
	if c.mu.unread {
		return catalog.ErrUnread
	}
	return nil
}

// following says who leads if this is a follower.
func (c *Controller) following() error {
	if c.leader == nil {
		return nil
	}
	return &NotLeaderError{Leader: c.leader()}
}

// Reset takes the place of all that was known. Whoever watches has to begin
// anew.
func (c *Controller) Reset(cat *catalog.Catalog) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.unread {
		c.mu.unread = false
		close(c.informed)
	}
	c.mu.cat = cat
	close(c.mu.ending)
	c.mu.ending = make(chan struct{})
	c.cfg.Log.Info("following", obs.KeyVersion, cat.Version())
}

// Apply takes an event that the leader has committed.
func (c *Controller) Apply(e catalog.Event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	effects, err := c.mu.cat.Apply(e)
	if err != nil {
		return fmt.Errorf("follow: %w", err)
	}
	for _, effect := range effects {
		switch effect := effect.(type) {
		case catalog.PlacementChanged:
			c.wakeLocked(effect.Topic)
		case catalog.StateChanged:
			c.wakeLocked(effect.Topic)
		}
	}
	return nil
}
