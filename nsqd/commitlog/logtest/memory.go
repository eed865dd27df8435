package logtest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// Memory is a Log that keeps nothing: slow and obvious, for tests. Its zero value
// is empty. A Sync makes durable what Crash cannot lose.
type Memory struct {
	// Fail, if not nil, is asked before each operation by the method's name, and is the
	// error that it returns. Set before use.
	Fail func(method string) error

	mu sync.Mutex

	// Guarded by mu.
	records []commitlog.Record // ascending
	next    commitlog.Offset
	synced  commitlog.Offset
	trimmed commitlog.Offset
	cursors []byte
	saved   commitlog.Offset // next when cursors was saved
}

func (m *Memory) fail(method string) error {
	if m.Fail == nil {
		return nil
	}
	return m.Fail(method)
}

// Append is of commitlog.Log.
func (m *Memory) Append(batch []commitlog.Record) (commitlog.Offset, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail("Append"); err != nil {
		return 0, err
	}
	for i := range batch {
		if r := &batch[i]; len(r.Channel) > commitlog.MaxChannel {
			return 0, fmt.Errorf("%w: a channel's name of %d bytes", commitlog.ErrRecord, len(r.Channel))
		}
	}
	first := m.next
	for i := range batch {
		batch[i].Offset = max(batch[i].Offset, m.next)
		if i == 0 {
			first = batch[i].Offset
		}
		m.next = batch[i].Offset + 1
		m.records = append(m.records, clone(batch[i]))
	}
	return first, nil
}

func clone(r commitlog.Record) commitlog.Record {
	r.Body, r.Channel = bytes.Clone(r.Body), bytes.Clone(r.Channel)
	return r
}

// Sync is of commitlog.Log.
func (m *Memory) Sync(upTo commitlog.Offset) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail("Sync"); err != nil {
		return err
	}
	m.synced = max(m.synced, min(upTo, m.next))
	return nil
}

// Read is of commitlog.Log.
func (m *Memory) Read(from commitlog.Offset, limit commitlog.Limit, into *commitlog.Batch) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	into.Records, into.Next = into.Records[:0], from
	if err := m.fail("Read"); err != nil {
		return err
	}
	size, total := 0, 0
	var found []commitlog.Record
	for _, r := range m.records {
		if r.Offset < from {
			continue
		}
		if size += len(r.Body); len(found) > 0 && (len(found) >= limit.Records || size > limit.Bytes) {
			break
		}
		found = append(found, r)
		total += len(r.Body) + len(r.Channel)
	}
	buf := into.Buffer(total)[:0]
	for _, r := range found {
		at := len(buf)
		buf = append(buf, r.Body...)
		r.Body = buf[at:len(buf):len(buf)]
		at = len(buf)
		buf = append(buf, r.Channel...)
		r.Channel = buf[at:len(buf):len(buf)]
		into.Records = append(into.Records, r)
		into.Next = r.Offset + 1
	}
	return nil
}

// Trim is of commitlog.Log. It frees at once.
func (m *Memory) Trim(before commitlog.Offset) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail("Trim"); err != nil {
		return err
	}
	before = min(before, m.next)
	m.trimmed = max(m.trimmed, before)
	m.records = slices.DeleteFunc(m.records, func(r commitlog.Record) bool { return r.Offset < before })
	return nil
}

// SaveCursors is of commitlog.Log.
func (m *Memory) SaveCursors(b []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail("SaveCursors"); err != nil {
		return err
	}
	m.cursors, m.saved = append([]byte{}, b...), m.next
	return nil
}

// LoadCursors is of commitlog.Log.
func (m *Memory) LoadCursors() ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail("LoadCursors"); err != nil {
		return nil, err
	}
	return bytes.Clone(m.cursors), nil
}

// Crash is the loss of power: a part of what was appended last and not synced is
// lost, from a place on that chance decides.
func (m *Memory) Crash(rng *rand.Rand) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i, _ := slices.BinarySearchFunc(m.records, m.synced, func(r commitlog.Record, o commitlog.Offset) int {
		if r.Offset < o {
			return -1
		}
		return 1
	})
	keep := i + rng.IntN(len(m.records)-i+1)
	next := max(m.synced, m.saved, m.trimmed)
	if keep > 0 {
		next = max(next, m.records[keep-1].Offset+1)
	}
	m.records, m.next = m.records[:keep:keep], next
}

// Len is how many records there are.
func (m *Memory) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.records)
}
