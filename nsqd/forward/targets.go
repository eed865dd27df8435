package forward

import "sync"

// targets limits the number of metric labels for brokers.
type targets struct {
	mu struct {
		sync.RWMutex
		known map[string]bool
	}
}

func newTargets() *targets {
	t := &targets{}
	t.mu.known = map[string]bool{}
	return t
}

// label returns a broker's address, or a common label.
func (t *targets) label(address string) string {
	if address == "" {
		return "none"
	}
	t.mu.RLock()
	known := t.mu.known[address]
	t.mu.RUnlock()
	if known {
		return address
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.known) >= maxTargets && !t.mu.known[address] {
		return "other"
	}
	t.mu.known[address] = true
	return address
}
