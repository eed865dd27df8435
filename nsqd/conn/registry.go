package conn

import (
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/list"
)

// registry lists the open connections. The zero value is ready.
//
// A client that has not completed the required TLS and AUTH is a stranger. At the connection limit,
// a new client replaces the stranger that connected first, as in connlimit. So strangers replace
// each other, and a client that verifies itself in time keeps its place.
type registry struct {
	accepted atomic.Uint64
	refused  atomic.Uint64 // over the limit, or accept failed
	evicted  atomic.Uint64 // strangers

	mu struct {
		sync.Mutex
		clients   map[*client]struct{}
		strangers list.List[*client] // the strangers among clients, oldest first
		leaving   int                // number of evicted clients still in clients; they do not count towards the limit
		more      int                // descriptors of clients beside their sockets
		closing   bool
	}
	wg sync.WaitGroup // of clients
}

// standing is a client's place in the registry. Guarded by mu.
type standing struct {
	stranger, leaving bool
	place             list.Element[*client] // in strangers
}

// enter registers a client. It refuses the client after close, and at the limit (0: no limit) if no
// stranger can be evicted. If out is not nil, the caller must call out.cut. Each successful enter
// must be followed by left.
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

// placeLocked finds a place for one more descriptor of c, and evicts a stranger if necessary.
// Evicted clients keep their descriptors for a moment, so only limit/32 of them may exist at a
// time.
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

// known marks a client as verified.
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

// expand counts an additional descriptor of a client as a connection, or refuses it. A sixteenth
// above the limit is reserved for such descriptors. If out is not nil, the caller must call out.cut.
// Each successful expand must be followed by shrink.
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

// left removes a client that has ended.
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

// close makes enter refuse all clients.
func (r *registry) close() {
	r.mu.Lock()
	r.mu.closing = true
	r.mu.Unlock()
}

// spawn runs do in a goroutine that wg waits for. It returns false after close.
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

// each calls do for each client that is listed now, without the lock.
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
