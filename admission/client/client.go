package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/wire"
)

// Config is how a Client asks.
type Config struct {
	// Servers are the UDP addresses (host:port), in the order in which they have the
	// partitions.
	Servers []string
	// Keys authenticate; the first one seals. Without any, servers must not want one.
	Keys []wire.Key
	// DefaultAdmit is the reply when no server answers.
	DefaultAdmit bool
	// DefaultFor is that for keys with a prefix; of several the longest counts.
	DefaultFor map[string]bool
	// Attempts is how often a question is sent at most; 0 is DefaultAttempts, which take
	// up to 20 ms.
	Attempts int
	// PaperTimers sends again after 100 us each time, as the Janus paper does.
	PaperTimers bool
}

// Decision is what a key may do.
type Decision struct {
	Admit      bool
	ByDefault  bool          // by a default rule, for want of one of the key's own
	Shadow     bool          // admitted although the rule would have denied
	Unanswered bool          // no server decided: Admit is the default reply
	Left       int64         // whole credits, if admitted
	RetryAfter time.Duration // if denied: when the credits would be there; -1 for never, 0 for unknown
}

// Client asks. It is safe for concurrent use; Close ends it.
type Client struct {
	cfg   Config
	links []*link
}

// New connects to nothing yet: servers may come later.
func New(cfg Config) (*Client, error) {
	if len(cfg.Servers) == 0 {
		return nil, errors.New("no admission server is named")
	}
	if len(cfg.Servers) > rule.Partitions {
		return nil, fmt.Errorf("%d admission servers: want at most %d", len(cfg.Servers), rule.Partitions)
	}
	if cfg.Attempts == 0 {
		cfg.Attempts = DefaultAttempts
	}
	c := &Client{cfg: cfg}
	for _, address := range cfg.Servers {
		l, err := dial(address, cfg)
		if err != nil {
			c.Close()
			return nil, err
		}
		c.links = append(c.links, l)
	}
	return c, nil
}

// Close ends the client; who waits gets the default reply.
func (c *Client) Close() {
	for _, l := range c.links {
		l.close()
	}
}

// Ask takes cost credits of the key's, if it has them. It always decides: where no
// server answers in time, or ctx ends, by the default reply.
// Requires: rule.ValidKey(key); what is none is denied.
func (c *Client) Ask(ctx context.Context, key string, cost uint32) Decision {
	return c.ask(ctx, key, cost, 0)
}

// Peek is Ask, and takes nothing.
func (c *Client) Peek(ctx context.Context, key string, cost uint32) Decision {
	return c.ask(ctx, key, cost, wire.Peek)
}

func (c *Client) ask(ctx context.Context, key string, cost uint32, flags uint8) Decision {
	if rule.ValidKey(key) != nil {
		return Decision{}
	}
	l := c.links[rule.Partition(key, rule.Partitions)*len(c.links)/rule.Partitions]
	a, ok := l.ask(ctx, wire.Question{Kind: wire.Ask, Flags: flags, Cost: cost, Key: []byte(key)})
	if !ok {
		return Decision{Admit: c.fallback(key), Unanswered: true}
	}
	d := Decision{Admit: a.Flags&wire.Admit != 0, ByDefault: a.Flags&wire.ByDefault != 0, Shadow: a.Flags&wire.Shadow != 0}
	switch {
	case d.Admit:
		d.Left = int64(a.Value)
	case a.Value == math.MaxUint32:
		d.RetryAfter = -1
	default:
		d.RetryAfter = time.Duration(a.Value) * time.Millisecond
	}
	return d
}

func (c *Client) fallback(key string) bool {
	admit, length := c.cfg.DefaultAdmit, -1
	for prefix, reply := range c.cfg.DefaultFor {
		if len(prefix) > length && strings.HasPrefix(key, prefix) {
			admit, length = reply, len(prefix)
		}
	}
	return admit
}
