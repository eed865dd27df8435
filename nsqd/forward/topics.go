package forward

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/clock"
)

const (
	// pollEvery is the interval between lookups of a topic with relayed subscriptions.
	pollEvery = time.Second
	// goneAfter is the number of consecutive lookups that must miss a known topic. A following
	// loaddistributor may know a topic later than the leader.
	goneAfter = 3
)

// topic holds the brokers of a topic, for all its relayed subscriptions.
type topic struct {
	// Set once.
	name string
	stop context.CancelFunc

	users int // guarded by Forwarder.mu

	mu struct {
		sync.Mutex
		addresses []string
		gone      error
		changed   chan struct{} // closed and replaced when addresses or gone change
	}
}

// watch looks up the brokers of a topic until unwatch.
func (f *Forwarder) watch(name string) *topic {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.mu.topics[name]
	if t == nil {
		t = &topic{name: name}
		t.mu.changed = make(chan struct{})
		var ctx context.Context
		ctx, t.stop = context.WithCancel(f.ctx)
		f.mu.topics[name] = t
		f.all.Go(func() { t.poll(ctx, f.publishers.Brokers) }) // safe beside all.Wait: the caller counts in all
	}
	t.users++
	return t
}

func (f *Forwarder) unwatch(t *topic) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.users--; t.users == 0 {
		t.stop()
		if f.mu.topics[t.name] == t {
			delete(f.mu.topics, t.name)
		}
	}
}

// forget makes the next watch start a new lookup of the topic.
func (f *Forwarder) forget(t *topic) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.topics[t.name] == t {
		delete(f.mu.topics, t.name)
	}
}

// begin runs a subscription. It returns false if the Forwarder ends.
func (f *Forwarder) begin(do func()) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx.Err() != nil {
		return false
	}
	f.all.Go(do)
	return true
}

func (t *topic) poll(ctx context.Context, find func(context.Context, string) ([]string, error)) {
	known, missed := false, 0
	for {
		once, cancel := context.WithTimeout(ctx, within)
		addresses, err := find(once, t.name)
		cancel()
		switch {
		case err == nil:
			known, missed = true, 0
			t.set(addresses, nil)
		case errors.Is(err, client.ErrUnknown):
			if missed++; missed >= goneAfter || !known {
				t.set(nil, err)
				return
			}
		}
		if !clock.Sleep(ctx, pollEvery) {
			return
		}
	}
}

func (t *topic) set(addresses []string, gone error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if gone == nil && slices.Equal(addresses, t.mu.addresses) {
		return
	}
	t.mu.addresses, t.mu.gone = addresses, gone
	close(t.mu.changed)
	t.mu.changed = make(chan struct{})
}

func (t *topic) get() (addresses []string, changed <-chan struct{}, gone error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.addresses, t.mu.changed, t.mu.gone
}

// has reports whether a broker has the topic, according to the last lookup.
func (t *topic) has(address string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Contains(t.mu.addresses, address)
}
