// Package client requests decisions of an admission service: whether a key may go on.
//
//	c, err := client.New(client.Config{Servers: []string{"127.0.0.1:4193"}})
//	d := c.Ask(ctx, "user/17", 1)
//	if !d.Admit { ... d.RetryAfter ... }
//
// The client sends questions over UDP to the server that owns the key (link.go), each up to five
// times, and the server charges the question once. While a server looks the key up, the client waits up
// to Config.Wait. Otherwise the client falls back to a default reply, and reports a denial to the server.
// Limit is a net/http middleware (middleware.go).
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

// Config configures a Client.
type Config struct {
	// Servers has the UDP addresses (host:port) of all servers, as the servers advertise them
	// (--advertise). A server names the owner of a key that the server does not own.
	Servers []string
	// Keys authenticate datagrams; the first key seals. If Keys is empty, the servers must not require
	// keys.
	Keys []wire.Key
	// DefaultAdmit is the reply when no server answers.
	DefaultAdmit bool
	// DefaultFor overrides DefaultAdmit for keys with a prefix; the longest prefix counts.
	DefaultFor map[string]bool
	// Attempts is how often a question is sent to a server that gives no sign of life. 0:
	// DefaultAttempts, which take up to 20 ms.
	Attempts int
	// Wait is the maximum time of a decision, in which a server may look the key up. The question
	// carries the remaining time, after which the server does not charge the question. A context that
	// ends sooner shortens Wait. 0: DefaultWait. Only tests use more than MaxWait.
	Wait time.Duration
	// Local questions a server in this process first; ok is false if that server has no answer. nil: none.
	Local func(key string, cost uint32, peek bool) (a wire.Answer, ok bool)
	// PaperTimers sends a question again after 100 us each time, as in the Janus paper.
	PaperTimers bool
}

// Decision is the answer about a key.
type Decision struct {
	Admit      bool
	ByDefault  bool          // a default rule decided, as the key has no rule
	Shadow     bool          // admitted although the rule denies
	Unanswered bool          // no server decided: Admit is the default reply
	Left       int64         // whole credits left of the key
	RetryAfter time.Duration // if denied: until the key has the cost; -1: never, 0: unknown
	Full       time.Duration // until the key has all credits again; 0: unknown, or RetryAfter > 0
}

// maxMoves is how many servers that do not own the key a question may go to.
const maxMoves = 8

// Client sends questions to admission servers. A Client is safe for concurrent use until Close.
type Client struct {
	cfg    Config
	links  atomic.Pointer[[]*link]        // the slice is never empty and never modified
	owners [rule.Partitions]atomic.Uint64 // epoch << 32 | hash of the owner's address, from the last answer; 0: unknown
	mu     sync.Mutex                     // serializes SetServers and Close
	closed bool
}

// New connects to no server: servers may start later.
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

// SetServers replaces Config.Servers. An empty list changes nothing. Open questions to a removed server
// get the default reply. The error joins the errors of unusable addresses.
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
		matches := func(l *link) bool { return l.address == address }
		if slices.ContainsFunc(next, matches) {
			continue
		}
		if i := slices.IndexFunc(old, matches); i >= 0 {
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

// Close ends the client. Waiting callers get the default reply. A second Close does nothing.
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

// Ask takes cost credits from the key, if the key has them. Ask always decides: if no server answers
// within Config.Wait, or ctx ends, Ask returns the default reply. A denial takes no credits: if no
// answer has come, Ask reports the denial to the server. Ask denies an invalid key.
// Requires: rule.ValidKey(key).
func (c *Client) Ask(ctx context.Context, key string, cost uint32) Decision {
	return c.AskOr(ctx, key, cost, c.Fallback)
}

// AskOr is Ask with another default reply.
func (c *Client) AskOr(ctx context.Context, key string, cost uint32, admit func(key string) bool) Decision {
	return c.ask(ctx, key, cost, 0, admit)
}

// Peek is Ask without taking credits.
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
			if !d.Admit && a.link != nil && flags&wire.Peek == 0 {
				a.link.cancel(a.Number, cost, key)
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

// patience returns the deadline of a decision that begins now.
func (c *Client) patience(ctx context.Context) time.Time {
	deadline := time.Now().Add(c.cfg.Wait)
	if d, limited := ctx.Deadline(); limited && d.Before(deadline) {
		return d
	}
	return deadline
}

// askOwner sends the question to the presumed owner of the partition, and to the owner that this server
// names. If no answer comes, the partition's next question goes to another server, which may
// know a new owner. The unanswered question goes to no other server, as the first server may have
// charged the key.
func (c *Client) askOwner(ctx context.Context, p int, q wire.Question, deadline time.Time) (a answer, ok bool) {
	for range maxMoves {
		links, known := *c.links.Load(), c.owners[p].Load()
		i := slices.IndexFunc(links, func(l *link) bool { return l.hash == uint32(known) })
		if i < 0 {
			i = p * len(links) / rule.Partitions
		}
		a, ok = links[i].ask(ctx, q, deadline)
		switch version := uint64(a.Epoch)<<32 | uint64(a.Value); {
		case !ok:
			if ctx.Err() == nil {
				c.owners[p].CompareAndSwap(known, known&^math.MaxUint32|uint64(links[(i+1)%len(links)].hash))
			}
			return a, false
		case a.Kind != wire.Moved:
			if uint32(known) != links[i].hash { // ask the same server next, even if another server joins
				c.owners[p].CompareAndSwap(known, known&^math.MaxUint32|uint64(links[i].hash))
			}
			return a, true
		case version>>32 >= known>>32 && a.Value != links[i].hash && slices.ContainsFunc(links, func(l *link) bool { return l.hash == a.Value }):
			c.owners[p].CompareAndSwap(known, version)
			continue
		}
		if !clock.Sleep(ctx, longest) { // the new owner does not know yet, or the client does not know the new owner
			return answer{}, false
		}
	}
	c.owners[p].Store(0) // the owner may come from an earlier store
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
