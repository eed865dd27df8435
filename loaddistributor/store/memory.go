package store

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Memory stores events in the process's memory. The zero value is empty.
type Memory struct {
	alone
	mu struct {
		sync.Mutex
		leading  bool
		term     uint64 // number of the newest term
		snapshot []byte
		records  [][]byte // after the snapshot
	}
}

// ErrLed: a single-process store already has a leader.
var ErrLed = errors.New("the store has a leader already")

// Lead implements Store. It does not wait.
func (m *Memory) Lead(context.Context, string) (Term, *catalog.Catalog, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.leading {
		return nil, nil, ErrLed
	}
	cat, err := load(m.mu.snapshot)
	if err != nil {
		return nil, nil, err
	}
	for _, r := range m.mu.records {
		if err := replay(cat, cat.Version()+1, r); err != nil {
			return nil, nil, err
		}
	}
	m.mu.leading, m.mu.term = true, numberAfter(m.mu.term)
	return &memoryTerm{newTerm(m.mu.term, cat), m}, cat, nil
}

// Clone returns a store with the present contents of m and no leader, as after a crash.
func (m *Memory) Clone() *Memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := &Memory{}
	c.mu.term, c.mu.snapshot, c.mu.records = m.mu.term, m.mu.snapshot, slices.Clone(m.mu.records)
	return c
}

type memoryTerm struct {
	term
	store *Memory
}

// Append implements Term.
func (t *memoryTerm) Append(_ context.Context, base uint64, events []catalog.Event) error {
	records, err := t.records(base, events)
	if err != nil {
		return err
	}
	t.store.mu.Lock()
	defer t.store.mu.Unlock()
	t.store.mu.records = append(t.store.mu.records, records...)
	t.head += uint64(len(records))
	return nil
}

// Compact implements Term.
func (t *memoryTerm) Compact(_ context.Context, d catalog.Dump) error {
	dump, err := t.dump(d)
	if err != nil {
		return err
	}
	t.store.mu.Lock()
	defer t.store.mu.Unlock()
	m := &t.store.mu
	first := t.head - uint64(len(m.records)) // version before the first record
	if d.Version < first {
		return ErrGap
	}
	m.snapshot, m.records = dump, m.records[d.Version-first:]
	return nil
}

// Resign implements Term.
func (t *memoryTerm) Resign(context.Context) error {
	t.store.mu.Lock()
	defer t.store.mu.Unlock()
	if !t.ended {
		t.ended, t.store.mu.leading = true, false
	}
	return nil
}
