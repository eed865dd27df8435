package conn

import (
	"sync"
	"sync/atomic"
)

// registry lists the connections that are open. The zero value is ready.
type registry struct {
	accepted atomic.Uint64
	refused  atomic.Uint64 // over the limit, or accept failed

	mu struct {
		sync.Mutex
		clients map[*client]struct{}
		more    int // descriptors that clients have beside their sockets
		closing bool
	}
	wg sync.WaitGroup // of clients
}

// enter lists a client, or refuses it: if there are limit of them, unless that
// is 0, or after close. Every enter that succeeds is followed by left.
func (r *registry) enter(c *client, limit int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closing || limit > 0 && len(r.mu.clients)+r.mu.more >= limit {
		r.refused.Add(1)
		return false
	}
	if r.mu.clients == nil {
		r.mu.clients = make(map[*client]struct{})
	}
	r.mu.clients[c] = struct{}{}
	r.wg.Add(1)
	r.accepted.Add(1)
	return true
}

// expand counts another descriptor that a client has, as if it were a connection, or refuses
// it. Where there are as many clients as there may be, a few of them may have one. Every
// expand that succeeds is followed by shrink.
func (r *registry) expand(limit int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if limit > 0 && len(r.mu.clients)+r.mu.more > limit+limit/16 {
		r.refused.Add(1)
		return false
	}
	r.mu.more++
	return true
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
