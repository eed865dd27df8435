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

// health is what is wrong with a Storage at present: one error for each place
// that has one. The zero value is well.
type health struct {
	mu     sync.Mutex
	faults map[place]error
	probed mono.Time // when the disk was last asked whether it takes anything
}

// place is who noted a fault: one topic's way to disk or back, and what it was
// about.
type place struct {
	topic string
	what  concern
}

type concern uint8

const (
	spilling   concern = iota // the store tries again by itself, and so notes the end of it
	saving                    // likewise
	publishing                // tried again by the next publisher, if there is one
	restoring                 // tried again by Broker.restoreAway
)

// probeEvery is how often the disk is asked, at most; probeSize with how many
// bytes.
const (
	probeEvery = time.Second
	probeSize  = 64 << 10
)

// note says how the last attempt ended.
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

// forget drops what was noted of a topic that is gone.
func (h *health) forget(topic string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.faults, func(p place, _ error) bool { return p.topic == topic })
}

// fault returns one of the present faults, the same one while it lasts.
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

// stale reports whether publishers have met faults whose end would not be noted, and it is time to see for oneself.
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

// published drops the faults that publishers met.
func (h *health) published() {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.faults, func(p place, _ error) bool { return p.what == publishing })
}

// probe reports whether what keeps messages takes some now.
func (s *Storage) probe() error {
	if s.cfg.Replicated != nil {
		return s.cfg.Replicated.Stores()
	}
	return s.dir.Probe(probeSize)
}

// Health returns why the disk does not do what it should, or nil. While only
// publishers were refused, the disk is asked again, at most once a second, so that
// a broker without publishers does not seem ill for ever.
func (b *Broker) Health() error {
	st := b.cfg.Storage
	if st == nil {
		return nil
	}
	if st.health.stale(clock.Mono()) && st.probe() == nil {
		st.health.published()
	}
	if err := b.metadataWriter.fault(); err != nil {
		return err
	}
	if st.cfg.Replicated != nil {
		if err := st.cfg.Replicated.Ready(); err != nil {
			return err
		}
	}
	return st.health.fault()
}
