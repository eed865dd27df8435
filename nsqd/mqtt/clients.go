package mqtt

import (
	"context"
	"sync"

	"github.com/srtm-io/srtm/mqtt/session"
)

// clients has the connected clients by client id.
type clients struct {
	mu struct {
		sync.Mutex
		byID map[string]*connected
	}
}

// connected is a client that is connected under its client id.
type connected struct {
	client *Client
	left   chan struct{} // closed when the client has left
}

func (cs *clients) init() { cs.mu.byID = map[string]*connected{} }

// enter connects a client under its client id. If another client has the id, enter ends the other
// connection and waits until the other client has released its subscriptions.
func (cs *clients) enter(ctx context.Context, id string, c *Client) error {
	for {
		cs.mu.Lock()
		other := cs.mu.byID[id]
		if other == nil {
			cs.mu.byID[id] = &connected{c, make(chan struct{})}
			cs.mu.Unlock()
			return nil
		}
		cs.mu.Unlock()
		other.client.end(&session.Error{Reason: session.TakenOver, Text: "another connection has the same client id"})
		select {
		case <-other.left:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// leave records that a client has released its subscriptions.
func (cs *clients) leave(id string, c *Client) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if entry := cs.mu.byID[id]; entry != nil && entry.client == c {
		delete(cs.mu.byID, id)
		close(entry.left)
	}
}

// refreshAll makes each client compare its sources with its filters.
func (cs *clients) refreshAll() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	for _, entry := range cs.mu.byID {
		entry.client.refresh()
	}
}
