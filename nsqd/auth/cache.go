package auth

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/singleflight"

	"github.com/srtm-io/srtm/internal/mono"
)

// maxGrants is the number of answers that a Cache remembers. Beyond it the cache forgets an
// answer and queries again for that client.
const maxGrants = 4096

// MaxWaiting is the recommended maximum of requests that wait for auth servers at once.
const MaxWaiting = 256

// ErrBusy: too many requests wait for the auth servers.
var ErrBusy = errors.New("too many requests wait for the auth servers")

// errAbandoned: the querying request ended, so the other waiting requests have no answer.
var errAbandoned = errors.New("the request was abandoned")

// Cache queries auth servers for clients that identify themselves with each request, for example
// over HTTP. It remembers each answer that grants something until the answer expires. Concurrent
// requests with the same query are sent once. Make it with NewCache. Safe for concurrent
// use.
type Cache struct {
	// Set once.
	ask        func(context.Context, Query) (*Grant, error)
	now        func() mono.Time
	maxWaiting int64 // maximum of waiting

	queries singleflight.Group
	waiting atomic.Int64

	mu struct {
		sync.Mutex
		grants map[Query]cachedGrant
	}
}

type cachedGrant struct {
	grant   *Grant
	expires mono.Time
}

// NewCache returns a cache in front of ask, for example Servers.Ask. If more than most requests
// wait, Ask returns ErrBusy: each may hold a descriptor, and a slow server must not block all
// requests of the broker.
func NewCache(ask func(context.Context, Query) (*Grant, error), now func() mono.Time, maxWaiting int) *Cache {
	c := &Cache{ask: ask, now: now, maxWaiting: int64(maxWaiting)}
	c.mu.grants = make(map[Query]cachedGrant)
	return c
}

// Ask is Servers.Ask, with remembered answers. Errors: ErrBusy, the context's error, the errors
// of Servers.Ask.
func (c *Cache) Ask(ctx context.Context, q Query) (*Grant, error) {
	for {
		if g := c.cached(q); g != nil {
			return g, nil
		}
		g, err := c.wait(ctx, q)
		if !errors.Is(err, errAbandoned) || ctx.Err() != nil {
			return g, err
		}
	}
}

func (c *Cache) cached(q Query) *Grant {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.mu.grants[q]
	if k.grant != nil && !c.now().Before(k.expires) {
		delete(c.mu.grants, q)
		return nil
	}
	return k.grant
}

// wait sends a query, or waits for the same query of another request.
func (c *Cache) wait(ctx context.Context, q Query) (*Grant, error) {
	defer c.waiting.Add(-1)
	if c.waiting.Add(1) > c.maxWaiting {
		return nil, ErrBusy
	}
	key := fmt.Sprintf("%q %v %q %q", q.RemoteIP, q.TLS, q.CommonName, q.Secret)
	answered := c.queries.DoChan(key, func() (any, error) {
		g, err := c.ask(ctx, q)
		switch {
		case err == nil:
			c.store(q, g)
		case ctx.Err() != nil:
			err = errors.Join(errAbandoned, err)
		}
		return g, err
	})
	select {
	case a := <-answered:
		return a.Val.(*Grant), a.Err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// store stores an answer, unless the answer grants nothing: guessed secrets must not displace
// other answers.
func (c *Cache) store(q Query, g *Grant) {
	if g.Rules() == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if len(c.mu.grants) == maxGrants {
		c.evictOne(now)
	}
	c.mu.grants[q] = cachedGrant{g, now.Add(g.TTL)}
}

// evictOne makes room for one answer. Requires: mu held.
func (c *Cache) evictOne(now mono.Time) {
	maps.DeleteFunc(c.mu.grants, func(_ Query, k cachedGrant) bool { return !now.Before(k.expires) })
	for q := range c.mu.grants {
		if len(c.mu.grants) < maxGrants {
			return
		}
		delete(c.mu.grants, q)
	}
}
