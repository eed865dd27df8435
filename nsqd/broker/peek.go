package broker

import (
	"fmt"
	"slices"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// Peeked is a message as Peek shows it.
type Peeked struct {
	ID        wire.MessageID
	Offset    uint64    // in the topic's log
	Timestamp mono.Wall // of publication
	Attempts  uint16    // deliveries so far
	Body      []byte
}

// Bounds of Peek: what it shows at most, beside the first message, and what it reads for that.
const (
	MaxPeek      = 1000    // messages
	MaxPeekBytes = 1 << 20 // of bodies
	peekReads    = 100
)

// Peek returns copies of the messages that the channel would deliver next, in order, and
// takes none: from memory and from disk; neither those in flight nor those deferred. While
// others take messages it may leave out some of these. count is at least 1, and at most
// MaxPeek of them are shown.
// Errors: ErrUnknownChannel; that of the disk.
func (t *Topic) Peek(channel string, count int) (shown []Peeked, err error) {
	count = min(count, MaxPeek)
	size := 0
	show := func(p Peeked) {
		if size += len(p.Body); size > MaxPeekBytes && len(shown) > 0 {
			count = 0 // no more
		}
		if len(shown) < count {
			p.Body = slices.Clone(p.Body)
			shown = append(shown, p)
		}
	}
	message := func(m *queue.Message, attempts uint16) {
		show(Peeked{m.ID, uint64(m.Offset), m.Timestamp, attempts, m.Body})
	}
	t.mu.Lock()
	c := t.mu.core.Channel(channel)
	if c == nil {
		t.mu.Unlock()
		return nil, fmt.Errorf("channel %q: %w", channel, ErrUnknownChannel)
	}
	c.Peek(count, message)
	single, attempts, from := c.Unread(t.broker.now(), count)
	t.mu.Unlock()

	var batch commitlog.Batch
	read := func(from queue.Offset, most int) error {
		batch.Next, batch.Records = commitlog.Offset(from), batch.Records[:0]
		if t.store == nil {
			return nil
		}
		if log := t.store.log.Load(); log != nil {
			return log.Read(commitlog.Offset(from), commitlog.Limit{Records: most, Bytes: MaxPeekBytes}, &batch)
		}
		return nil
	}
	record := func(r *commitlog.Record, attempts uint16) {
		show(Peeked{r.ID, uint64(r.Offset), r.Timestamp, attempts, r.Body})
	}
	for i, o := range single {
		if len(shown) >= count {
			return shown, nil
		}
		if err := read(o, 1); err != nil {
			return shown, err
		}
		if rs := batch.Records; len(rs) > 0 && queue.Offset(rs[0].Offset) == o {
			record(&rs[0], max(attempts[i], rs[0].Attempts))
		}
	}
	for n := 0; len(shown) < count && n < peekReads; n++ {
		t.mu.Lock()
		end := t.mu.core.InLog()
		if from >= end {
			c.PeekTail(from, count-len(shown), message)
			t.mu.Unlock()
			break
		}
		t.mu.Unlock()
		if err := read(from, count); err != nil {
			return shown, err
		}
		t.mu.Lock()
		for i := range batch.Records {
			if r := &batch.Records[i]; c.PeekTakes(queue.Offset(r.Offset), string(r.Channel)) {
				record(r, r.Attempts)
			}
		}
		t.mu.Unlock()
		if next := queue.Offset(batch.Next); next > from {
			from = next
		} else {
			from = end // there is nothing before it
		}
	}
	return shown, nil
}
