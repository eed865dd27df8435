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
	// lookupInterval is the interval between lookups of a topic with relayed subscriptions. With more than
	// maxLookups topics the interval grows, so that this broker makes at most maxLookups lookups in an interval.
	lookupInterval = time.Second
	maxLookups     = 500
	// maxMissedLookups is the number of consecutive lookups that must miss a known topic. A following
	// loaddistributor may know a topic later than the leader.
	maxMissedLookups = 3
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
		err       error
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
		f.all.Go(func() { t.poll(ctx, f.publishers.Brokers, f.lookupPause) }) // safe beside all.Wait: the caller counts in all
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

// discard makes the next watch start a new lookup of the topic.
func (f *Forwarder) discard(t *topic) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.topics[t.name] == t {
		delete(f.mu.topics, t.name)
	}
}

// start runs a subscription. It returns false if the Forwarder ends.
func (f *Forwarder) start(do func()) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx.Err() != nil {
		return false
	}
	f.all.Go(do)
	return true
}

// lookupPause returns the time between two lookups of a topic.
func (f *Forwarder) lookupPause() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return lookupInterval * time.Duration(1+len(f.mu.topics)/maxLookups)
}

func (t *topic) poll(ctx context.Context, find func(context.Context, string) ([]string, error), pause func() time.Duration) {
	found, missed := false, 0
	for {
		lookupCtx, cancel := context.WithTimeout(ctx, requestTimeout)
		addresses, err := find(lookupCtx, t.name)
		cancel()
		switch {
		case err == nil:
			found, missed = true, 0
			t.set(addresses, nil)
		case errors.Is(err, client.ErrUnknown):
			if missed++; missed >= maxMissedLookups || !found {
				t.set(nil, err)
				return
			}
		}
		if !clock.Sleep(ctx, pause()) {
			return
		}
	}
}

func (t *topic) set(addresses []string, lookupErr error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if lookupErr == nil && slices.Equal(addresses, t.mu.addresses) {
		return
	}
	t.mu.addresses, t.mu.err = addresses, lookupErr
	close(t.mu.changed)
	t.mu.changed = make(chan struct{})
}

func (t *topic) get() (addresses []string, changed <-chan struct{}, lookupErr error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.addresses, t.mu.changed, t.mu.err
}

// has reports whether a broker has the topic, according to the last lookup.
func (t *topic) has(address string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Contains(t.mu.addresses, address)
}
