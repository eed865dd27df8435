package conn

import (
	"sync"
	"sync/atomic"

	"github.com/srtm-io/srtm/internal/container"
)

// registry lists the open connections. The zero value is ready.
//
// A client that has not completed the required TLS and AUTH is unverified. At the connection limit,
// a new client replaces the unverified client that connected first, as in bounded.Slots. So unverified
// clients replace each other, and a client that verifies itself in time keeps its place.
type registry struct {
	accepted atomic.Uint64
	refused  atomic.Uint64 // over the limit, or accept failed
	evicted  atomic.Uint64 // unverified clients

	mu struct {
		sync.Mutex
		clients          map[*client]struct{}
		unverified       container.List[*client] // the unverified among clients, oldest first
		evictedOpen      int                     // number of evicted clients still in clients; they do not count towards the limit
		extraDescriptors int                     // descriptors of clients beside their sockets
		closing          bool
	}
	wg sync.WaitGroup // of clients
}

// registration is a client's place in the registry. Guarded by mu.
type registration struct {
	unverified, evicted bool
	element             container.Element[*client] // in unverified
}

// enter registers a client. It refuses the client after close, and at the limit (0: no limit) if no
// unverified client can be evicted. If evicted is not nil, the caller must call evicted.cut. Each
// successful enter must be followed by remove.
func (r *registry) enter(c *client, limit int, unverified bool) (evicted *client, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closing {
		r.refused.Add(1)
		return nil, false
	}
	if evicted, ok = r.reserveLocked(c, limit); !ok {
		return nil, false
	}
	if r.mu.clients == nil {
		r.mu.clients = make(map[*client]struct{})
	}
	r.mu.clients[c] = struct{}{}
	if c.unverified = unverified; unverified {
		r.mu.unverified.Push(&c.element, c)
	}
	r.wg.Add(1)
	r.accepted.Add(1)
	return evicted, true
}

// reserveLocked finds a place for one more descriptor of c, and evicts an unverified client if
// necessary. Evicted clients keep their descriptors for a moment, so only limit/32 of them may
// exist at a time.
func (r *registry) reserveLocked(c *client, limit int) (evicted *client, ok bool) {
	if limit == 0 || len(r.mu.clients)+r.mu.extraDescriptors-r.mu.evictedOpen < limit {
		return nil, true
	}
	evicted = r.mu.unverified.Front()
	if evicted == nil || evicted == c || r.mu.evictedOpen > limit/32 {
		r.refused.Add(1)
		return nil, false
	}
	r.markVerifiedLocked(evicted)
	evicted.evicted = true
	r.mu.evictedOpen++
	r.evicted.Add(1)
	return evicted, true
}

// markVerified marks a client as verified.
func (r *registry) markVerified(c *client) {
	r.mu.Lock()
	r.markVerifiedLocked(c)
	r.mu.Unlock()
}

func (r *registry) markVerifiedLocked(c *client) {
	if c.unverified {
		c.unverified = false
		c.element.Remove()
	}
}

// addDescriptor counts an additional descriptor of a client as a connection, or refuses it. A sixteenth
// above the limit is reserved for such descriptors. If out is not nil, the caller must call out.cut.
// Each successful expand must be followed by shrink.
func (r *registry) addDescriptor(c *client, limit int) (evicted *client, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if limit > 0 {
		limit += limit/16 + 1
	}
	if evicted, ok = r.reserveLocked(c, limit); ok {
		r.mu.extraDescriptors++
	}
	return evicted, ok
}

func (r *registry) removeDescriptor() {
	r.mu.Lock()
	r.mu.extraDescriptors--
	r.mu.Unlock()
}

// remove removes a client that has ended.
func (r *registry) remove(c *client) {
	r.mu.Lock()
	delete(r.mu.clients, c)
	r.markVerifiedLocked(c)
	if c.evicted {
		r.mu.evictedOpen--
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
