package pool

import (
	"context"
	"math"
	"sync"

	"golang.org/x/sync/semaphore"
)

// memoryLimit bounds the bytes of publishes in progress, in total and per broker. So publishes to
// a slow broker leave room for others.
type memoryLimit struct {
	// Set once.
	total, perBroker int64 // bytes
	all              *semaphore.Weighted

	mu *struct {
		sync.Mutex
		brokers map[string]*share // by address; only brokers in use
	}
}

// share holds the publishes to one broker, in progress or waiting.
type share struct {
	bytes *semaphore.Weighted
	users int // guarded by memoryLimit.mu
}

func newMemoryLimit(total, perBroker int64) memoryLimit {
	if total == 0 {
		total = math.MaxInt64
	}
	if perBroker == 0 {
		perBroker = total
	}
	r := memoryLimit{total: total, perBroker: perBroker, all: semaphore.NewWeighted(total)}
	r.mu = &struct {
		sync.Mutex
		brokers map[string]*share
	}{brokers: map[string]*share{}}
	return r
}

// acquire waits for room for a publish to a broker, and returns a function that releases
// the room. A publish above the bound waits until it is the only one.
func (r *memoryLimit) acquire(ctx context.Context, broker string, bytes int64) (release func(), err error) {
	r.mu.Lock()
	entry := r.mu.brokers[broker]
	if entry == nil {
		entry = &share{bytes: semaphore.NewWeighted(r.perBroker)}
		r.mu.brokers[broker] = entry
	}
	entry.users++
	r.mu.Unlock()
	leaveBroker := func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if entry.users--; entry.users == 0 {
			delete(r.mu.brokers, broker)
		}
	}
	brokerBytes, totalBytes := min(bytes, r.perBroker), min(bytes, r.total)
	if err := entry.bytes.Acquire(ctx, brokerBytes); err != nil {
		leaveBroker()
		return nil, err
	}
	if err := r.all.Acquire(ctx, totalBytes); err != nil {
		entry.bytes.Release(brokerBytes)
		leaveBroker()
		return nil, err
	}
	return func() {
		r.all.Release(totalBytes)
		entry.bytes.Release(brokerBytes)
		leaveBroker()
	}, nil
}
