package broker

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
)

// health holds the current faults of a Storage, one per place. The zero value is healthy.
type health struct {
	mu     sync.Mutex
	faults map[place]error
	probed mono.Time // time of the last disk probe
}

// place identifies the source of a fault: a topic and an operation.
type place struct {
	topic string
	what  concern
}

type concern uint8

const (
	spilling   concern = iota // the store retries and reports the end of the fault
	saving                    // same as spilling
	publishing                // the next publisher retries, if there is one
	restoring                 // Broker.restoreAway retries
)

// probeEvery is the minimum interval between disk probes, probeSize the bytes of a probe.
const (
	probeEvery = time.Second
	probeSize  = 64 << 10
)

// note records the result of the last attempt.
func (h *health) note(p place, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		delete(h.faults, p)
		return
	}
	if h.faults == nil {
		h.faults = make(map[place]error)
	}
	h.faults[p] = err
}

// forget removes the faults of a deleted topic.
func (h *health) forget(topic string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.faults, func(p place, _ error) bool { return p.topic == topic })
}

// fault returns one of the current faults. The choice is stable while the fault lasts.
func (h *health) fault() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.faults) == 0 {
		return nil
	}
	first := slices.MinFunc(slices.Collect(maps.Keys(h.faults)), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.topic, b.topic), cmp.Compare(a.what, b.what))
	})
	return fmt.Errorf("queue %s: %w", first.topic, h.faults[first])
}

// stale reports whether only a probe can show the end of a publisher's fault, and the last
// probe is old enough. If so, stale records the time of the probe.
func (h *health) stale(now mono.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now.Sub(h.probed) < probeEvery {
		return false
	}
	for p := range h.faults {
		if p.what == publishing {
			h.probed = now
			return true
		}
	}
	return false
}

// published removes the faults of publishers.
func (h *health) published() {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.faults, func(p place, _ error) bool { return p.what == publishing })
}

// probe tests whether the storage accepts data.
func (s *Storage) probe() error {
	if s.cfg.Replicated != nil {
		return s.cfg.Replicated.Stores()
	}
	return s.dir.Probe(probeSize)
}

// Health returns the reason why the storage is unhealthy, or nil. After a refused
// publication Health probes the disk, at most once a second. Otherwise a broker without
// publishers would remain unhealthy.
func (b *Broker) Health() error {
	st := b.shared.cfg.Storage
	if st == nil {
		return nil
	}
	if st.health.stale(clock.Mono()) && st.probe() == nil {
		st.health.published()
	}
	if err := b.shared.metadataWriter.fault(); err != nil {
		return err
	}
	if st.cfg.Replicated != nil {
		if err := st.cfg.Replicated.Ready(); err != nil {
			return err
		}
	}
	return st.health.fault()
}
