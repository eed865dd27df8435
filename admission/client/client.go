package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/clock"
)

// Config is how a Client asks.
type Config struct {
	// Servers are the UDP addresses (host:port) of all servers, as they name themselves
	// (--advertise). Each says who owns what it does not.
	Servers []string
	// Keys authenticate; the first one seals. Without any, servers must not want one.
	Keys []wire.Key
	// DefaultAdmit is the reply when no server answers.
	DefaultAdmit bool
	// DefaultFor is that for keys with a prefix; of several the longest counts.
	DefaultFor map[string]bool
	// Attempts is how often a question is sent to a server that gives no sign of life; 0 is
	// DefaultAttempts, which take up to 20 ms.
	Attempts int
	// Wait is how long a decision takes at most: so long it waits for a server that looks the
	// key up. The question carries what is left of it, and the server does not charge it later.
	// A context that ends sooner shortens it. 0 is DefaultWait, and more than MaxWait is for tests.
	Wait time.Duration
	// Local is asked first: a server in this process, which may know the answer. nil: none.
	Local func(key string, cost uint32, peek bool) (a wire.Answer, ok bool)
	// PaperTimers sends again after 100 us each time, as the Janus paper does.
	PaperTimers bool
}

// Decision is what a key may do.
type Decision struct {
	Admit      bool
	ByDefault  bool          // by a default rule, for want of one of the key's own
	Shadow     bool          // admitted although the rule would have denied
	Unanswered bool          // no server decided: Admit is the default reply
	Left       int64         // whole credits that the key has left
	RetryAfter time.Duration // if denied: until the key has the cost; -1 for never, 0 for unknown
	Full       time.Duration // until the key has all its credits again; 0 for unknown, or if RetryAfter is more than 0
}

// maxMoves is how many servers one question goes to that do not own its key.
const maxMoves = 8

// Client asks. It is safe for concurrent use; Close ends it.
type Client struct {
	cfg    Config
	links  atomic.Pointer[[]*link]        // never empty, never changed
	owners [rule.Partitions]atomic.Uint64 // epoch << 32 | hash of the owner's address, as last heard; 0 for not yet
	mu     sync.Mutex                     // held by SetServers and Close
	closed bool
}

// New connects to nothing yet: servers may come later.
func New(cfg Config) (*Client, error) {
	if len(cfg.Servers) == 0 {
		return nil, errors.New("no admission server is named")
	}
	cfg.Attempts = cmp.Or(cfg.Attempts, DefaultAttempts)
	cfg.Wait = cmp.Or(cfg.Wait, DefaultWait)
	if cfg.Wait < 0 {
		return nil, fmt.Errorf("a decision that waits %v: want more than 0", cfg.Wait)
	}
	c := &Client{cfg: cfg}
	c.links.Store(new([]*link))
	if err := c.SetServers(cfg.Servers); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// SetServers replaces Config.Servers; none changes nothing. Questions on their way to
// one that is gone get the default reply. Error: of addresses that cannot be used.
func (c *Client) SetServers(addresses []string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(addresses) == 0 || c.closed {
		return nil
	}
	old := *c.links.Load()
	var next []*link
	var errs []error
	for _, address := range addresses {
		same := func(l *link) bool { return l.address == address }
		if slices.ContainsFunc(next, same) {
			continue
		}
		if i := slices.IndexFunc(old, same); i >= 0 {
			next = append(next, old[i])
			continue
		}
		if l, err := dial(address, c.cfg); err != nil {
			errs = append(errs, err)
		} else {
			next = append(next, l)
		}
	}
	if len(next) == 0 {
		return errors.Join(errs...)
	}
	c.links.Store(&next)
	for _, l := range old {
		if !slices.Contains(next, l) {
			l.close()
		}
	}
	return errors.Join(errs...)
}

// Close ends the client; who waits gets the default reply. A second one does nothing.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.closed = true
	for _, l := range *c.links.Load() {
		l.close()
	}
}

// Ask takes cost credits of the key's, if it has them. It always decides: if no server answers
// within Config.Wait, or ctx ends, by the default reply. A denial takes no credits: if no answer
// has come, the server is told.
// Requires: rule.ValidKey(key); what is none is denied.
func (c *Client) Ask(ctx context.Context, key string, cost uint32) Decision {
	return c.AskOr(ctx, key, cost, c.Fallback)
}

// AskOr is Ask with another default reply.
func (c *Client) AskOr(ctx context.Context, key string, cost uint32, admit func(key string) bool) Decision {
	return c.ask(ctx, key, cost, 0, admit)
}

// Peek is Ask, and takes nothing.
func (c *Client) Peek(ctx context.Context, key string, cost uint32) Decision {
	return c.ask(ctx, key, cost, wire.Peek, c.Fallback)
}

func (c *Client) ask(ctx context.Context, key string, cost uint32, flags uint8, admit func(key string) bool) Decision {
	if rule.ValidKey(key) != nil {
		return Decision{}
	}
	var a answer
	ok := false
	if c.cfg.Local != nil {
		a.Answer, ok = c.cfg.Local(key, cost, flags&wire.Peek != 0)
	}
	if !ok {
		q := wire.Question{Kind: wire.Ask, Flags: flags, Cost: cost, Key: []byte(key)}
		if a, ok = c.askOwner(ctx, rule.Partition(key, rule.Partitions), q, c.patience(ctx)); !ok {
			d := Decision{Admit: admit(key), Unanswered: true}
			if !d.Admit && a.from != nil && flags&wire.Peek == 0 {
				a.from.cancel(a.Number, cost, key)
			}
			return d
		}
	}
	d := Decision{
		Admit: a.Flags&wire.Admit != 0, ByDefault: a.Flags&wire.ByDefault != 0, Shadow: a.Flags&wire.Shadow != 0,
		Left: int64(a.Value),
	}
	wait := time.Duration(min(a.Wait, math.MaxInt64/uint64(time.Millisecond))) * time.Millisecond
	switch {
	case d.Admit:
		d.Full = wait
	case a.Flags&wire.Never != 0:
		d.Full, d.RetryAfter = wait, -1
	default:
		d.RetryAfter = wait
	}
	return d
}

// patience returns when a decision that begins now ends.
func (c *Client) patience(ctx context.Context) time.Time {
	until := time.Now().Add(c.cfg.Wait)
	if d, limited := ctx.Deadline(); limited && d.Before(until) {
		return d
	}
	return until
}

// askOwner asks who is thought to own the partition, and then who that one says does.
// Where no answer comes the next question goes to another server, which may know a new
// owner; this one does not, for it may have been charged.
func (c *Client) askOwner(ctx context.Context, p int, q wire.Question, until time.Time) (a answer, ok bool) {
	for range maxMoves {
		links, known := *c.links.Load(), c.owners[p].Load()
		i := slices.IndexFunc(links, func(l *link) bool { return l.hash == uint32(known) })
		if i < 0 {
			i = p * len(links) / rule.Partitions
		}
		a, ok = links[i].ask(ctx, q, until)
		switch heard := uint64(a.Epoch)<<32 | uint64(a.Value); {
		case !ok:
			if ctx.Err() == nil {
				c.owners[p].CompareAndSwap(known, known&^math.MaxUint32|uint64(links[(i+1)%len(links)].hash))
			}
			return a, false
		case a.Kind != wire.Moved:
			if uint32(known) != links[i].hash { // that one is asked next, also when another server joins
				c.owners[p].CompareAndSwap(known, known&^math.MaxUint32|uint64(links[i].hash))
			}
			return a, true
		case heard>>32 >= known>>32 && a.Value != links[i].hash && slices.ContainsFunc(links, func(l *link) bool { return l.hash == a.Value }):
			c.owners[p].CompareAndSwap(known, heard)
			continue
		}
		if !clock.Sleep(ctx, longest) { // the new owner has not heard of it yet, or we have not of the new owner
			return answer{}, false
		}
	}
	c.owners[p].Store(0) // what was heard may be of a store that is no more
	return answer{}, false
}

// Fallback returns the default reply to a question about a key.
func (c *Client) Fallback(key string) bool {
	admit, length := c.cfg.DefaultAdmit, -1
	for prefix, reply := range c.cfg.DefaultFor {
		if len(prefix) > length && strings.HasPrefix(key, prefix) {
			admit, length = reply, len(prefix)
		}
	}
	return admit
}
