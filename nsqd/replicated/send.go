package replicated

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// flight is a block on its way.
type flight struct {
	block *block
	ack   jetstream.PubAckFuture
}

// send stores blocks in order until the log ends. Each block names its predecessor's sequence in
// the stream. So if a block is not stored, no later block is, and JetStream refuses late and
// duplicate blocks.
func (l *Log) send(last uint64) {
	defer close(l.done)
	var flying []flight
	for wait := time.Duration(0); ; {
		var failed error
		for len(flying) < window && failed == nil {
			b := l.nextBlock()
			if b == nil {
				break
			}
			var ack jetstream.PubAckFuture
			ack, failed = l.cluster.js.PublishMsgAsync(&nats.Msg{Subject: l.part.subject(), Data: b.data},
				jetstream.WithExpectLastSequence(last+uint64(len(flying))), jetstream.WithRetryAttempts(0))
			if failed == nil {
				flying = append(flying, flight{b, ack})
			}
		}
		if failed == nil && len(flying) == 0 {
			select {
			case <-l.wake:
				continue
			case <-l.stop:
				return
			}
		}
		if failed == nil {
			select {
			case ack := <-flying[0].ack.Ok():
				last = ack.Sequence
				l.stored(flying[0].block, last)
				flying = slices.Delete(flying, 0, 1)
				wait = 0
				continue
			case failed = <-flying[0].ack.Err():
				flying = flying[1:]
			case <-l.wake:
				continue
			case <-l.stop:
				return
			}
		}
		for _, f := range flying { // wait for the result of each; each has a timeout
			select {
			case <-f.ack.Ok():
			case <-f.ack.Err():
			case <-l.stop:
				return
			}
		}
		flying = flying[:0]
		var ok bool
		if last, ok = l.recover(last, failed, &wait); !ok {
			return
		}
	}
}

// nextBlock returns the next block to send, or nil.
func (l *Log) nextBlock() *block {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.pending {
		if !b.sent {
			// Sealed for good: the copy on its way may still be stored.
			b.sealed, b.sent = true, true
			b.head.append(b.data[:0]) // the block's end is known now
			return b
		}
	}
	return nil
}

// stored records that the oldest unstored block is in the stream.
func (l *Log) stored(b *block, seq uint64) {
	l.mu.Lock()
	l.pending[0] = nil
	l.pending = l.pending[1:]
	l.countBytes(-len(b.data))
	l.stats.StoredSeconds += time.Since(b.start).Seconds()
	l.durable = b.next
	l.failing = nil
	size := int64(len(b.data) + len(l.part.subject()) + blockCost)
	l.stats.Bytes += size
	l.stats.Fsyncs++
	l.marks.size += size
	l.marks.add(mark{offset: b.first, seq: seq, size: l.marks.size})
	l.mu.Unlock()
	l.changed.Broadcast()
}

const (
	minWait = 50 * time.Millisecond
	maxWait = time.Second
)

// recover finds out which blocks are stored after a block was not acknowledged. It waits, longer
// each time, until the other blocks may be sent again after sequence last. If ok is false the log
// has ended.
func (l *Log) recover(acked uint64, cause error, wait *time.Duration) (last uint64, ok bool) {
	l.mu.Lock()
	if l.failing == nil {
		l.failingSince = time.Now()
		l.log().Warn("cannot store a block; retrying", obs.KeyError, cause)
	}
	l.failing = cause
	l.mu.Unlock()
	l.changed.Broadcast()
	for missing := 0; ; {
		*wait = min(max(minWait, 2**wait), maxWait)
		select {
		case <-time.After(*wait):
		case <-l.stop:
			return 0, false
		}
		l.changed.Broadcast() // a caller that waits in Append checks how long storing has failed
		ctx, cancel := l.cluster.timeout(patience)
		h, last, err := l.newest(ctx)
		owns, upTo := l.owns(h, last), h.next
		if err == nil && !owns {
			upTo, err = l.findOurs(ctx, acked, last)
		}
		cancel()
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			if missing++; missing == sureGone {
				l.log().Warn("another broker has taken the topic's part over: its stream is gone")
				l.fail(ErrFenced)
				return 0, false
			}
		}
		if err != nil {
			l.mu.Lock()
			l.failing = err
			l.mu.Unlock()
			continue
		}
		l.mu.Lock()
		var found []*block
		for _, b := range l.pending {
			if b.sent && b.next <= upTo {
				found = append(found, b)
			}
			b.sent = false
		}
		l.mu.Unlock()
		for i, b := range found { // in order, with consecutive sequences
			l.stored(b, acked+1+uint64(i))
		}
		if !owns {
			l.log().Warn("another broker has claimed the topic's part", "epoch", h.owner.epoch)
			l.fail(ErrFenced)
			return 0, false
		}
		return last, true
	}
}

// findOurs returns the next offset after the blocks that this owner has stored after a sequence. It
// is for a part that another owner has claimed: the other owner's blocks have the same offsets as
// the unstored blocks of this owner. A block that was trimmed meanwhile counts as not stored.
func (l *Log) findOurs(ctx context.Context, after, newest uint64) (next commitlog.Offset, err error) {
	for seq := after + 1; seq <= newest; seq++ {
		m, err := l.get(ctx, seq)
		if err != nil {
			return 0, err
		}
		if m == nil {
			break
		}
		h, err := parseHead(m.Data)
		if err != nil || h.owner != l.owner {
			return next, err
		}
		next = h.next
	}
	return next, nil
}
