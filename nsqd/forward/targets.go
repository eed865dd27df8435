package forward

import "sync"

// targets limits the number of metric labels for brokers.
type targets struct {
	mu struct {
		sync.RWMutex
		labels map[string]bool
	}
}

func newTargets() *targets {
	t := &targets{}
	t.mu.labels = map[string]bool{}
	return t
}

// label returns a broker's address, or a common label.
func (t *targets) label(address string) string {
	if address == "" {
		return "none"
	}
	t.mu.RLock()
	listed := t.mu.labels[address]
	t.mu.RUnlock()
	if listed {
		return address
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.labels) >= maxTargets && !t.mu.labels[address] {
		return "other"
	}
	t.mu.labels[address] = true
	return address
}
