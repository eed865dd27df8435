package conn

import (
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/list"
)

// registry lists the connections that are open. The zero value is ready.
//
// A client that has yet to do what is required of all, TLS or AUTH, is a stranger. Where there
// are as many clients as there may be, another gets the place of the stranger who connected
// first, as in connlimit: strangers take each other's places, and one who shows in time who it
// is keeps its own.
type registry struct {
	accepted atomic.Uint64
	refused  atomic.Uint64 // over the limit, or accept failed
	evicted  atomic.Uint64 // strangers

	mu struct {
		sync.Mutex
		clients   map[*client]struct{}
		strangers list.List[*client] // of them, the one that connected first in front
		leaving   int                // of them, those that were evicted: they do not count
		more      int                // descriptors that clients have beside their sockets
		closing   bool
	}
	wg sync.WaitGroup // of clients
}

// standing is how a client is listed. Guarded by mu.
type standing struct {
	stranger, leaving bool
	place             list.Element[*client] // of a stranger
}

// enter lists a client, or refuses it: if there are limit of them, unless that
// is 0, or after close. Every enter that succeeds is followed by left. Who is out is to be cut;
// nil: no client.
func (r *registry) enter(c *client, limit int, stranger bool) (out *client, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closing {
		r.refused.Add(1)
		return nil, false
	}
	if out, ok = r.placeLocked(c, limit); !ok {
		return nil, false
	}
	if r.mu.clients == nil {
		r.mu.clients = make(map[*client]struct{})
	}
	r.mu.clients[c] = struct{}{}
	if c.stranger = stranger; stranger {
		r.mu.strangers.Push(&c.place, c)
	}
	r.wg.Add(1)
	r.accepted.Add(1)
	return out, true
}

// placeLocked finds a place for what c brings, if need be that of a stranger. Those who leave
// have their descriptors for a moment yet, so they may not be many.
func (r *registry) placeLocked(c *client, limit int) (out *client, ok bool) {
	if limit == 0 || len(r.mu.clients)+r.mu.more-r.mu.leaving < limit {
		return nil, true
	}
	out = r.mu.strangers.Front()
	if out == nil || out == c || r.mu.leaving > limit/32 {
		r.refused.Add(1)
		return nil, false
	}
	r.knownLocked(out)
	out.leaving = true
	r.mu.leaving++
	r.evicted.Add(1)
	return out, true
}

// known: a client is no stranger any more.
func (r *registry) known(c *client) {
	r.mu.Lock()
	r.knownLocked(c)
	r.mu.Unlock()
}

func (r *registry) knownLocked(c *client) {
	if c.stranger {
		c.stranger = false
		c.place.Remove()
	}
}

// expand counts another descriptor that a client has, as if it were a connection, or refuses
// it. Where there are as many clients as there may be, a few of them may have one. Every
// expand that succeeds is followed by shrink. Who is out, as for enter.
func (r *registry) expand(c *client, limit int) (out *client, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if limit > 0 {
		limit += limit/16 + 1
	}
	if out, ok = r.placeLocked(c, limit); ok {
		r.mu.more++
	}
	return out, ok
}

func (r *registry) shrink() {
	r.mu.Lock()
	r.mu.more--
	r.mu.Unlock()
}

// left takes a client off the list that has ended.
func (r *registry) left(c *client) {
	r.mu.Lock()
	delete(r.mu.clients, c)
	r.knownLocked(c)
	if c.leaving {
		r.mu.leaving--
	}
	r.mu.Unlock()
	r.wg.Done()
}

// close has enter refuse from now on.
func (r *registry) close() {
	r.mu.Lock()
	r.mu.closing = true
	r.mu.Unlock()
}

// spawn runs do in a goroutine that wg waits for, unless the registry is closed.
func (r *registry) spawn(do func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closing {
		return false
	}
	r.wg.Go(do)
	return true
}

func (r *registry) len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.mu.clients)
}

// each calls do for the clients that are listed now, without the lock.
func (r *registry) each(do func(*client)) {
	r.mu.Lock()
	clients := make([]*client, 0, len(r.mu.clients))
	for c := range r.mu.clients {
		clients = append(clients, c)
	}
	r.mu.Unlock()
	for _, c := range clients {
		do(c)
	}
}
