package broker

import (
	"fmt"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// Peeked is a copy of a message.
type Peeked struct {
	ID        wire.MessageID
	Offset    uint64    // in the topic's log
	Timestamp mono.Wall // publication time
	Attempts  uint16    // deliveries so far
	Body      []byte
}

// Bounds of Peek. The first message may exceed MaxPeekBytes. peekReads bounds the reads of
// the log.
const (
	MaxPeek      = 1000    // messages
	MaxPeekBytes = 1 << 20 // bytes of bodies
	peekReads    = 100
)

// Peek returns copies of the messages that the channel would deliver next, in order,
// without removing any. The copies are consistent at one moment. They include released
// messages that no consumer has, in memory and on disk, but no in-flight or deferred
// messages. count is at least 1; Peek returns at most MaxPeek messages.
// Errors: ErrUnknownChannel; errors of the disk.
func (t *Topic) Peek(channel string, count int) ([]Peeked, error) {
	if t.store != nil { // keeps the messages that are on disk at this moment
		t.store.saving.Lock()
		defer t.store.saving.Unlock()
	}
	shown, last := peeking{count: min(count, MaxPeek)}, peeking{count: min(count, MaxPeek)}
	t.runner.mu.Lock()
	c := t.runner.mu.core.Channel(channel)
	if c == nil {
		t.runner.mu.Unlock()
		return nil, fmt.Errorf("channel %q: %w", channel, ErrUnknownChannel)
	}
	unread := c.Peek(t.runner.shared.now(), shown.count, shown.message, last.message)
	t.runner.mu.Unlock()

	if err := t.store.peek(&unread, &shown); err != nil {
		return shown.all, err
	}
	for _, m := range last.all {
		shown.add(m)
	}
	return shown.all, nil
}

// peeking collects the result of Peek.
type peeking struct {
	all         []Peeked
	count, size int
}

func (p *peeking) full() bool { return len(p.all) >= p.count }

func (p *peeking) add(m Peeked) {
	if p.size += len(m.Body); p.size > MaxPeekBytes && len(p.all) > 0 {
		p.count = 0 // no more
	}
	if !p.full() {
		m.Body = slices.Clone(m.Body)
		p.all = append(p.all, m)
	}
}

func (p *peeking) message(m *queue.Message, attempts uint16) {
	p.add(Peeked{m.ID, uint64(m.Offset), m.Timestamp, attempts, m.Body})
}

func (p *peeking) record(r *commitlog.Record, attempts uint16) {
	p.add(Peeked{r.ID, uint64(r.Offset), r.Timestamp, attempts, r.Body})
}

// peek reads the unread messages from the log, if there is a store. Requires: saving held.
func (st *store) peek(u *queue.Unread, p *peeking) error {
	if st == nil {
		return nil
	}
	log := st.log.Load()
	if log == nil {
		return nil
	}
	var batch commitlog.Batch
	for i, o := range u.Single {
		if p.full() {
			return nil
		}
		if err := log.Read(commitlog.Offset(o), commitlog.Limit{Records: 1, Bytes: 1}, &batch); err != nil {
			return err
		}
		if rs := batch.Records; len(rs) > 0 && queue.Offset(rs[0].Offset) == o {
			p.record(&rs[0], max(u.Attempts[i], rs[0].Attempts))
		}
	}
	for at, n := commitlog.Offset(u.From), 0; at < commitlog.Offset(u.To) && !p.full() && n < peekReads; n++ {
		if err := log.Read(at, commitlog.Limit{Records: p.count, Bytes: MaxPeekBytes}, &batch); err != nil {
			return err
		}
		for i := range batch.Records {
			if r := &batch.Records[i]; u.Takes(queue.Offset(r.Offset), string(r.Channel)) {
				p.record(r, r.Attempts)
			}
		}
		if batch.Next == at {
			return nil
		}
		at = batch.Next
	}
	return nil
}
