package auth

import (
	"context"
	"errors"
	"sync"

	"github.com/srtm-io/srtm/internal/mono"
)

const (
	// maxGrants is how many answers a Cache remembers; beyond, it forgets one of
	// them, whose client is asked for again.
	maxGrants = 4096
	// maxWaiting is how many may wait for auth servers at once; beyond, ErrBusy.
	// A server that is slow must not keep all requests that there may be.
	maxWaiting = 256
)

// ErrBusy: as many wait for auth servers as may.
var ErrBusy = errors.New("too many wait for the auth servers")

// Cache asks for clients that say who they are with each request, as over HTTP, and
// remembers each answer that permits something for as long as it holds. Those who
// ask the same at once share one question. Make it with NewCache. Safe for
// concurrent use.
type Cache struct {
	// Set once.
	ask func(context.Context, Query) (*Grant, error)
	now func() mono.Time

	mu struct {
		sync.Mutex
		known   map[Query]known
		asked   map[Query]*question
		waiting int
	}
}

type known struct {
	grant   *Grant
	expires mono.Time
}

// question is one that is being asked.
type question struct {
	done chan struct{} // closed when the rest is set
	// Owned by who asks, until done.
	grant     *Grant
	err       error
	abandoned bool // who asked went away: that is no answer for others
}

// NewCache returns a cache before ask, Servers.Ask for instance.
func NewCache(ask func(context.Context, Query) (*Grant, error), now func() mono.Time) *Cache {
	c := &Cache{ask: ask, now: now}
	c.mu.known = make(map[Query]known)
	c.mu.asked = make(map[Query]*question)
	return c
}

// Ask is Servers.Ask, unless the answer is known. Errors: ErrBusy, that of the
// context, those of Servers.Ask.
func (c *Cache) Ask(ctx context.Context, q Query) (*Grant, error) {
	for {
		g, asked, mine, err := c.look(q)
		if g != nil || err != nil {
			return g, err
		}
		if mine {
			asked.grant, asked.err = c.ask(ctx, q)
			asked.abandoned = asked.err != nil && ctx.Err() != nil
			c.answered(q, asked)
			return asked.grant, asked.err
		}
		select {
		case <-asked.done:
		case <-ctx.Done():
			err = ctx.Err()
		}
		c.mu.Lock()
		c.mu.waiting--
		c.mu.Unlock()
		switch {
		case err != nil:
			return nil, err
		case !asked.abandoned:
			return asked.grant, asked.err
		}
	}
}

// look returns what is known, or the question that is being asked, and whether it is
// the caller's to ask.
func (c *Cache) look(q Query) (g *Grant, asked *question, mine bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k, ok := c.mu.known[q]; ok {
		if c.now().Before(k.expires) {
			return k.grant, nil, false, nil
		}
		delete(c.mu.known, q)
	}
	if c.mu.waiting == maxWaiting {
		return nil, nil, false, ErrBusy
	}
	c.mu.waiting++
	if asked = c.mu.asked[q]; asked == nil {
		asked, mine = &question{done: make(chan struct{})}, true
		c.mu.asked[q] = asked
	}
	return nil, asked, mine, nil
}

// answered remembers an answer and tells those who wait for it. One that permits
// nothing is not remembered: secrets that are guessed would take the place of others.
func (c *Cache) answered(q Query, asked *question) {
	c.mu.Lock()
	c.mu.waiting--
	delete(c.mu.asked, q)
	if asked.err == nil && asked.grant.Rules() > 0 {
		now := c.now()
		if len(c.mu.known) == maxGrants {
			c.forget(now)
		}
		c.mu.known[q] = known{asked.grant, now.Add(asked.grant.TTL)}
	}
	c.mu.Unlock()
	close(asked.done)
}

// forget makes room for one. Requires: mu held.
func (c *Cache) forget(now mono.Time) {
	for q, k := range c.mu.known {
		if !now.Before(k.expires) {
			delete(c.mu.known, q)
		}
	}
	for q := range c.mu.known {
		if len(c.mu.known) < maxGrants {
			return
		}
		delete(c.mu.known, q)
	}
}
