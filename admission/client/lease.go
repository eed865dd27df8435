package client

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/srtm-io/srtm/admission/lease"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/wire"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

const (
	maxLeases   = 10_000           // that Decide makes; for other keys it asks
	renewLease  = lease.Length / 8 // between questions
	lateAnswer  = lease.Length / 8 // to one
	unusedLease = 10 * time.Second // then it is not renewed
)

// leases are those of a client.
type leases struct {
	ctx    context.Context // of those that are renewed
	stop   func()
	asking sync.WaitGroup // for them
	now    func() mono.Time

	mu    sync.RWMutex
	byKey map[string]*Lease
}

func (l *leases) init() {
	l.ctx, l.stop = context.WithCancel(context.Background())
	l.byKey, l.now = make(map[string]*Lease), clock.Mono
}

// end returns when nothing is renewed any more.
func (l *leases) end() {
	l.mu.Lock()
	l.stop()
	l.mu.Unlock()
	l.asking.Wait()
}

func (l *leases) of(key string) *Lease {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.byKey[key]
}

// Lease is a part of a key whose rule is leased: a share of its refill and of its capacity,
// which the key's owner moves to where requests are. It holds it as long as it is used: from
// a moment after a request, and until 10 s after the last one. It is safe for concurrent use.
type Lease struct {
	client *Client
	key    string

	mu     sync.Mutex // taken before leases.mu
	part   *lease.Part
	flags  uint8     // as the owner said last
	used   mono.Time // last
	asking bool      // it is being renewed
}

// Lease returns the key's. Requires: rule.ValidKey(key).
func (c *Client) Lease(key string) *Lease {
	if l := c.leases.of(key); l != nil {
		return l
	}
	c.leases.mu.Lock()
	defer c.leases.mu.Unlock()
	l := c.leases.byKey[key]
	if l == nil {
		l = &Lease{client: c, key: key, part: lease.NewPart(key, rand.Uint64()|1)}
		c.leases.byKey[key] = l
	}
	return l
}

// Decide is Ask where it has to be: for a key whose rule is leased it decides by what it
// holds, at once, and asks only while that is nothing, or less than the cost. Where no
// server answers then, a rule that fails open admits, once a server has said that it does.
func (c *Client) Decide(ctx context.Context, key string, cost uint32) Decision {
	l := c.leases.of(key)
	if l != nil {
		if d := l.Admit(cost); !d.Unanswered {
			return d
		}
	}
	d := c.Ask(ctx, key, cost)
	switch {
	case l == nil && d.Leased && c.leases.room():
		c.Lease(key).Admit(0)
	case l != nil && d.Unanswered:
		d.Admit = d.Admit || l.failsOpen()
	}
	return d
}

func (l *leases) room() bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return len(l.byKey) < maxLeases
}

func (l *Lease) failsOpen() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.flags&wire.FailOpen != 0
}

// Admit takes cost credits of what is held, if they are there. It never waits, and does not
// allocate. Unanswered: nothing is held, yet or any more, or less than the cost at any time;
// that denies, unless the rule fails open and a server has said so.
func (l *Lease) Admit(cost uint32) Decision {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.client.leases.now()
	l.used = now
	if !l.asking {
		l.asking = l.client.leases.start(l)
	}
	admit, held, retry := l.part.Admit(int64(cost), now)
	d := Decision{Admit: admit, Leased: true}
	switch {
	case !held || !l.part.Holds(l.client.leases.now()): // the process may have stood still meanwhile
		d.Unanswered, d.Admit = true, l.flags&wire.FailOpen != 0
	case admit:
		d.Left = l.part.Left(now)
	case l.flags&wire.Shadow != 0:
		d.Admit, d.Shadow = true, true
	default:
		d.RetryAfter = retry
	}
	return d
}

// start reports false when the client was closed.
func (l *leases) start(one *Lease) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() != nil {
		return false
	}
	l.asking.Go(one.run)
	return true
}

// run renews until it is not used any more, or the client is closed.
func (l *Lease) run() {
	all := &l.client.leases
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-all.ctx.Done():
		}
		now := clock.Mono()
		l.mu.Lock()
		if all.ctx.Err() != nil || now.Sub(l.used) > unusedLease {
			l.asking = false
			all.forget(l)
			l.mu.Unlock()
			return
		}
		held, offered := l.part.Ask(now)
		l.mu.Unlock()
		wait := renewLease
		if l.renew(now, wire.Question{Kind: wire.Lease, Cost: offered, Key: []byte(l.key), Held: held}) {
			wait = 0
		}
		timer.Reset(wait)
	}
}

// renew asks the owner. It reports whether that is to be told at once what came of it.
func (l *Lease) renew(asked mono.Time, q wire.Question) (again bool) {
	asking := time.Now()
	ctx, cancel := context.WithTimeout(l.client.leases.ctx, lateAnswer)
	defer cancel()
	a, ok := l.client.askOwner(ctx, rule.Partition(l.key, rule.Partitions), q, asking.Add(lateAnswer))
	if !ok {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flags = a.Flags
	if a.Kind == wire.Granted {
		return l.part.Take(asked, clock.Mono(), a.grant, time.Duration(a.Value)*time.Millisecond)
	}
	if a.Flags&wire.Leased == 0 {
		l.client.leases.forget(l) // what it still holds ends by itself
	}
	return false
}

// forget has Decide ask again.
func (l *leases) forget(one *Lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byKey[one.key] == one {
		delete(l.byKey, one.key)
	}
}
