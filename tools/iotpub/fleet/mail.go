package fleet

import (
	"sync"

	"github.com/srtm-io/srtm/internal/mono"
)

// mail is what other goroutines have to say to a worker. It is bounded: flags,
// the newest assignment of each publisher, and one entry for each goroutine
// that waits for a snapshot.
type mail struct {
	started, stop, abort bool
	start                mono.Time
	assignments          map[int32]Assignment
	snapshots            []chan<- Stats
}

func (m *mail) assign(a Assignment) {
	if old, ok := m.assignments[a.Source]; ok && old.Epoch > a.Epoch {
		return
	}
	if m.assignments == nil {
		m.assignments = map[int32]Assignment{}
	}
	m.assignments[a.Source] = a
}

// mailbox hands mail to the worker, which takes all of it at once. The zero
// value takes mail and wakes nobody.
type mailbox struct {
	mu struct {
		sync.Mutex
		mail
		wake   func() // nil until there is someone to wake
		full   bool
		closed bool
	}
}

// open has every later post call wake.
func (b *mailbox) open(wake func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.wake = wake
}

// post changes the mail and wakes the worker. false: the worker has ended, and
// nothing was changed.
func (b *mailbox) post(change func(*mail)) bool {
	b.mu.Lock()
	if b.mu.closed {
		b.mu.Unlock()
		return false
	}
	change(&b.mu.mail)
	b.mu.full = true
	wake := b.mu.wake
	b.mu.Unlock()
	if wake != nil {
		wake()
	}
	return true
}

// take empties the mailbox.
func (b *mailbox) take() (mail, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	m, full := b.mu.mail, b.mu.full
	b.mu.mail, b.mu.full = mail{}, false
	return m, full
}

// close refuses all further mail and returns what was left.
func (b *mailbox) close() mail {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.closed = true
	m := b.mu.mail
	b.mu.mail = mail{}
	return m
}
