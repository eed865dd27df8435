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

// maxGrants is how many answers a Cache remembers; beyond, it forgets one of
// them, whose client is asked for again.
const maxGrants = 4096

// MaxWaiting is how many should wait for auth servers at once, of any number of requests.
const MaxWaiting = 256

// ErrBusy: as many wait for auth servers as may.
var ErrBusy = errors.New("too many wait for the auth servers")

// errAbandoned: who asked went away, which is no answer for others.
var errAbandoned = errors.New("the question was abandoned")

// Cache asks for clients that say who they are with each request, as over HTTP, and
// remembers each answer that permits something for as long as it holds. Those who
// ask the same at once share one question. Make it with NewCache. Safe for
// concurrent use.
type Cache struct {
	// Set once.
	ask  func(context.Context, Query) (*Grant, error)
	now  func() mono.Time
	most int64 // that wait

	asked   singleflight.Group
	waiting atomic.Int64

	mu struct {
		sync.Mutex
		known map[Query]known
	}
}

type known struct {
	grant   *Grant
	expires mono.Time
}

// NewCache returns a cache before ask, Servers.Ask for instance. Beyond so many that wait,
// which may each take a descriptor, it answers ErrBusy: a server that is slow must not keep all
// requests that there may be.
func NewCache(ask func(context.Context, Query) (*Grant, error), now func() mono.Time, most int) *Cache {
	c := &Cache{ask: ask, now: now, most: int64(most)}
	c.mu.known = make(map[Query]known)
	return c
}

// Ask is Servers.Ask, unless the answer is known. Errors: ErrBusy, that of the
// context, those of Servers.Ask.
func (c *Cache) Ask(ctx context.Context, q Query) (*Grant, error) {
	for {
		if g := c.remembered(q); g != nil {
			return g, nil
		}
		g, err := c.wait(ctx, q)
		if !errors.Is(err, errAbandoned) || ctx.Err() != nil {
			return g, err
		}
	}
}

func (c *Cache) remembered(q Query) *Grant {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.mu.known[q]
	if k.grant != nil && !c.now().Before(k.expires) {
		delete(c.mu.known, q)
		return nil
	}
	return k.grant
}

// wait asks, or waits for the one who asks the same.
func (c *Cache) wait(ctx context.Context, q Query) (*Grant, error) {
	defer c.waiting.Add(-1)
	if c.waiting.Add(1) > c.most {
		return nil, ErrBusy
	}
	key := fmt.Sprintf("%q %v %q %q", q.RemoteIP, q.TLS, q.CommonName, q.Secret)
	answered := c.asked.DoChan(key, func() (any, error) {
		g, err := c.ask(ctx, q)
		switch {
		case err == nil:
			c.remember(q, g)
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

// remember keeps an answer, unless it permits nothing: secrets that are guessed would take
// the place of others.
func (c *Cache) remember(q Query, g *Grant) {
	if g.Rules() == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if len(c.mu.known) == maxGrants {
		c.forget(now)
	}
	c.mu.known[q] = known{g, now.Add(g.TTL)}
}

// forget makes room for one. Requires: mu held.
func (c *Cache) forget(now mono.Time) {
	maps.DeleteFunc(c.mu.known, func(_ Query, k known) bool { return !now.Before(k.expires) })
	for q := range c.mu.known {
		if len(c.mu.known) < maxGrants {
			return
		}
		delete(c.mu.known, q)
	}
}
