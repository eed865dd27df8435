package replicated

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// Errors that callers distinguish; returned wrapped.
var (
	// ErrFenced means that another broker has claimed the part. Records that were not stored by
	// then are lost.
	ErrFenced = errors.New("another broker owns the topic's part by now")
	// ErrUnavailable means that JetStream stores nothing now: most of its servers are down or do
	// not answer. A later call may succeed.
	ErrUnavailable = errors.New("JetStream stores nothing now")
	// ErrEnded means that the broker stops and no longer waits for JetStream: see
	// Cluster.EndAfter.
	ErrEnded = errors.New("the broker stops and waits for JetStream no longer")
	// ErrNoPart means that the part does not exist.
	ErrNoPart = errors.New("there is nothing of it in JetStream")
)

const (
	// window is the maximum number of blocks on their way.
	window = 64
	// maxPending bounds the unstored bytes of one log, and maxPendingAll of all logs. Beyond a
	// bound Append waits. A log without unstored bytes may always append a batch.
	maxPending    = 32 << 20
	maxPendingAll = 512 << 20
	// maxBlock is the maximum size of a block of several records, in bytes.
	maxBlock = 256 << 10
	// blockCost is the maximum size, in bytes, that a stream adds to a block's subject and data:
	// its own header, and the header with the expected sequence.
	blockCost = 100
	// patience limits how long Sync waits for JetStream. Append refuses after half of it without
	// a stored block.
	patience = 5 * time.Second
	// segment is the size that Stats counts as a segment, in bytes: a stream has no segments.
	segment = 64 << 20
)

// Log is the log of one part. In memory it holds only the unstored records, and marks of the
// positions of blocks.
//
// Append numbers records and leaves them to a goroutine that stores the records in order, several
// blocks at a time. Most replicas of the stream acknowledge a stored block, so the block survives
// the loss of a machine. Only Sync reports that records are stored.
type Log struct {
	cluster   *Cluster
	stream    jetstream.Stream
	part      part
	owner     owner
	unremoved bool        // see Unremoved; set by claim
	detach    func() bool // detaches the log from the end of the cluster; set by open

	wake chan struct{} // capacity 1: there is something to send
	stop chan struct{} // closed by Close
	done chan struct{} // closed when send has returned

	keeping sync.Mutex // serializes trimming and saving; acquired before mu
	cursors cursors    // guarded by keeping

	mu           sync.Mutex
	changed      *sync.Cond // of mu: durable, err, failing or pending have changed
	next         commitlog.Offset
	durable      commitlog.Offset // all records before it are stored
	pending      []*block         // unstored blocks, oldest first; Read reads them from memory
	bytes        int              // of pending
	err          error            // permanent: ErrFenced, ErrEnded, or commitlog.ErrClosed
	failing      error            // why nothing is stored now
	failingSince time.Time        // start of failing
	marks        marks
	gaps         map[uint64]bool // sequences of blocks that disappeared without a trim
	retain       commitlog.Retain
	stats        commitlog.Stats
	trimmed      commitlog.Offset // the highest offset passed to Trim
	purged       time.Time        // time of the last purge by Trim
	looked       time.Time        // time of the last look at the stream
	claimed      time.Time        // time of this owner's claim; set once
}

// block is a block that is not stored yet.
type block struct {
	head
	data   []byte
	sealed bool // takes no further record
	sent   bool // since the last check of the stored blocks
	start  time.Time
}

// open claims a part for an owner with the given epoch; 0 selects an epoch after the last
// owner's.
func open(c *Cluster, p part, epoch uint64) (*Log, error) {
	ctx, cancel := c.timeout(patience)
	defer cancel()
	if existing, err := c.stream(ctx, p.stream()); err == nil && !slices.Contains(existing.CachedInfo().Config.Subjects, p.subject()) {
		return nil, fmt.Errorf("open the stream of topic %s: %s has it already, as %q", p, p.stream(), existing.CachedInfo().Config.Subjects)
	}
	config := jetstream.StreamConfig{
		Name: p.stream(), Subjects: []string{p.subject()},
		Description: "what a broker of SRTM carries of topic " + p.topic,
		Replicas:    c.cfg.Replicas, Storage: jetstream.FileStorage, Discard: jetstream.DiscardNew,
		MaxBytes: cmp.Or(c.cfg.MaxBytes, -1), Duplicates: time.Second,
	}
	stream, err := ask(ctx, func(ctx context.Context) (jetstream.Stream, error) { return c.js.CreateOrUpdateStream(ctx, config) })
	if err != nil {
		return nil, fmt.Errorf("open the stream of topic %s: %w", p, err)
	}
	l := &Log{
		cluster: c, stream: stream, part: p,
		owner: owner{epoch: epoch, nonce: rand.Uint64()},
		gaps:  make(map[uint64]bool), wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
	}
	l.changed = sync.NewCond(&l.mu)
	l.cursors = cursors{cluster: c, part: p, owned: l.owned}
	last, err := l.claim(ctx)
	if err != nil {
		return nil, fmt.Errorf("claim topic %s: %w", p, err)
	}
	l.detach = context.AfterFunc(c.ctx, func() { l.fail(ErrEnded) })
	go l.send(last)
	return l, nil
}

// claim claims the part for this owner, and returns the sequence of the stream after which the
// owner's blocks follow.
func (l *Log) claim(ctx context.Context) (last uint64, err error) {
	for epoch := l.owner.epoch; ; {
		h, last, err := l.newest(ctx)
		if errors.Is(err, jetstream.ErrStreamNotFound) && ctx.Err() == nil {
			pause(ctx) // a server may not know a new stream yet
			continue
		}
		if err != nil {
			return 0, err
		}
		found, _, _, err := l.cursors.find(ctx)
		if err != nil {
			return 0, err
		}
		switch {
		case epoch == 0: // later than every previous owner's, even if nothing of that owner is left
			l.owner.epoch = max(h.owner.epoch, found.epoch, uint64(clock.Wall())) + 1
		case epoch < h.owner.epoch:
			return 0, fmt.Errorf("%w: epoch %d, it is at %d", ErrFenced, epoch, h.owner.epoch)
		}
		next := max(h.next, found.next)
		if l.unremoved = l.cluster.unremovedBy(l.part, h.owner); l.unremoved {
			l.cluster.recordUnremoved(l.part, h.owner, l.owner) // also if the outcome of the claim is unknown
		}
		claimed := head{owner: l.owner, first: next, next: next}
		ack, err := l.cluster.claimed(ctx, l.part.subject(), claimed.append(nil), jetstream.WithExpectLastSequence(last))
		if wrongSequence(err) {
			continue // another owner has stored a block, or claims the part at the same time
		}
		if err == nil {
			l.cursors.epoch = l.owner.epoch
			err = l.cursors.claim(ctx)
		}
		var info *jetstream.StreamInfo
		var oldest *jetstream.RawStreamMsg
		if err == nil {
			if info, oldest, err = l.oldest(ctx); err == nil && oldest == nil {
				err = ErrFenced // another owner has claimed the part and emptied it
			}
		}
		if epoch == 0 && errors.Is(err, ErrFenced) {
			continue // another owner has claimed the part in between
		}
		if err != nil {
			return 0, err
		}
		l.next, l.durable, l.claimed = next, next, time.Now()
		l.stats.Bytes = int64(info.State.Bytes)
		l.marks.first, l.marks.claim = info.State.FirstSeq, ack.Sequence
		l.marks.add(mark{offset: next, seq: ack.Sequence})
		if k, err := markOf(oldest); err == nil {
			l.stats.First = k.offset
			l.marks.add(k)
		}
		return ack.Sequence, nil
	}
}

// oldest returns the stream's oldest block, or nil if the stream is empty, and the stream's state
// then.
func (l *Log) oldest(ctx context.Context) (*jetstream.StreamInfo, *jetstream.RawStreamMsg, error) {
	for {
		info, err := infoOf(ctx, l.stream)
		if err != nil || info.State.Msgs == 0 {
			return info, nil, err
		}
		m, err := message(ctx, l.stream, info.State.FirstSeq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue // the previous owner purged the block in between
		}
		return info, m, err
	}
}

// newest returns the newest block of the stream, if any, and the stream's last sequence. The
// sequence is greater than the block's if the last message was deleted.
func (l *Log) newest(ctx context.Context) (head, uint64, error) {
	for tries := 1; ; tries++ {
		info, err := infoOf(ctx, l.stream)
		if err != nil {
			return head{}, 0, err
		}
		m, err := newest(ctx, l.stream, l.part.subject())
		switch {
		case errors.Is(err, jetstream.ErrMsgNotFound):
			if info.State.Msgs == 0 || tries == sureGone {
				return head{}, info.State.LastSeq, nil
			}
		case err != nil:
			return head{}, 0, err
		case m.Sequence >= info.State.LastSeq || tries == sureGone:
			h, err := parseHead(m.Data)
			return h, max(m.Sequence, info.State.LastSeq), err
		}
		pause(ctx)
	}
}

// owns reports whether the part belongs to this owner, given the results of last. It does so too
// if an operator has purged the stream and no other owner has claimed the part since.
func (l *Log) owns(newest head, last uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return newest.owner == l.owner || newest.owner == owner{} && last == l.marks.last
}

// owned returns ErrFenced if another owner has claimed the part.
func (l *Log) owned(ctx context.Context) error {
	newest, last, err := l.newest(ctx)
	if err == nil && !l.owns(newest, last) || errors.Is(err, jetstream.ErrStreamNotFound) {
		return ErrFenced
	}
	return err
}

// sureGone is the number of failed lookups after which a stream or a block counts as gone. A
// server that has just started or become leader may not know it yet.
const sureGone = 5

// pause waits between two such lookups.
func pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(maxWait / sureGone):
	}
}

// wrongSequence reports whether JetStream refused a block because another block was stored before
// it.
func wrongSequence(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence ||
		api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}

// Append implements commitlog.Log. It returns before the records are stored, and waits only while
// too many bytes are unstored.
func (l *Log) Append(batch []commitlog.Record) (commitlog.Offset, error) {
	for i := range batch {
		if err := batch[i].Check(l.cluster.cfg.MaxBody); err != nil {
			return 0, fmt.Errorf("append to topic %s: %w", l.part, err)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(batch) > 0 && l.err == nil && l.overLimit() && !l.refusing() {
		l.changed.Wait()
	}
	switch {
	case l.err != nil:
		return 0, l.err
	case len(batch) == 0:
		return l.next, nil
	case l.refusing():
		l.stats.AppendErrors++
		return 0, fmt.Errorf("append to topic %s: %w: %w", l.part, ErrUnavailable, l.failing)
	}
	next := l.next
	for i := range batch {
		if o := &batch[i].Offset; *o < next {
			*o = next
		}
		if next = batch[i].Offset + 1; next == 0 {
			return 0, fmt.Errorf("append to topic %s: %w: no offset after it", l.part, commitlog.ErrRecord)
		}
	}
	for i := range batch {
		l.append(&batch[i])
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return batch[0].Offset, nil
}

// append adds a record to the newest unstored block. Requires: mu held.
func (l *Log) append(r *commitlog.Record) {
	size := recordHeader + len(r.Body) + len(r.Attribute) + len(r.Channel) + 64
	var b *block
	if n := len(l.pending); n > 0 {
		b = l.pending[n-1]
	}
	if b == nil || b.sealed || len(b.data)+size > l.cluster.blockSize || r.Offset-b.first > math.MaxUint32 {
		b = &block{head: head{owner: l.owner, first: r.Offset}, start: time.Now()}
		b.data = b.append(make([]byte, 0, blockHeader+size))
		l.countBytes(len(b.data))
		l.pending = append(l.pending, b)
	}
	start := len(b.data)
	b.data = appendRecord(b.data, r, b.first)
	b.attributes = b.attributes || len(r.Attribute) > 0
	b.next = r.Offset + 1
	l.countBytes(len(b.data) - start)
	l.next = b.next
	l.stats.Appended++
	l.stats.AppendedBytes += uint64(len(b.data) - start)
}

// countBytes adds n bytes to the unstored bytes; n may be negative. Requires: mu held.
func (l *Log) countBytes(n int) {
	l.bytes += n
	l.cluster.pending.Add(int64(n))
}

// overLimit requires mu held.
func (l *Log) overLimit() bool {
	return l.bytes > maxPending || l.bytes > 0 && l.cluster.pending.Load() > maxPendingAll
}

// refusing requires mu held.
func (l *Log) refusing() bool { return l.failing != nil && time.Since(l.failingSince) > patience/2 }

// Sync implements commitlog.Log. After a *commitlog.SyncError the records stay in memory until
// JetStream stores them. After ErrFenced they are lost.
func (l *Log) Sync(upTo commitlog.Offset) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if upTo <= l.durable {
		return nil
	}
	l.stats.Syncs++
	timedOut := false
	defer time.AfterFunc(patience, func() {
		l.mu.Lock()
		timedOut = true
		l.mu.Unlock()
		l.changed.Broadcast()
	}).Stop()
	for upTo > l.durable {
		if l.err == nil && !timedOut {
			l.changed.Wait()
			continue
		}
		l.stats.SyncErrors++
		if l.err != nil {
			return l.err
		}
		err := l.failing
		if err == nil {
			err = ErrUnavailable
		}
		return &commitlog.SyncError{Log: l.part.topic, First: l.durable, Err: err}
	}
	return nil
}

// UnstoredError means that JetStream had not confirmed messages when their log was closed.
type UnstoredError struct {
	Topic    string
	Messages int
	Bytes    int // of bodies
	Err      error
}

func (e *UnstoredError) Error() string {
	return fmt.Sprintf("topic %s: not stored in JetStream, as far as is known: %s (%s); their publishers were not answered OK: %v", e.Topic, plural.Count(e.Messages, "message"), plural.Count(e.Bytes, "byte"), e.Err)
}

func (e *UnstoredError) Unwrap() error { return e.Err }

// unstored adds the number of unstored published messages to an error. A copy of a message that
// was carried forward or taken over does not count, because the original message still exists.
func (l *Log) unstored(err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := UnstoredError{Topic: l.part.topic, Err: err}
	for _, b := range l.pending {
		for r := range records(b.data, head{owner: b.owner, first: b.first, next: b.next}) {
			if r.Access == 0 {
				e.Messages++
				e.Bytes += len(r.Body)
			}
		}
	}
	if e.Messages == 0 {
		return err
	}
	return &e
}

// Close stores the unstored records if JetStream is available soon, and gives the part up. Error:
// *UnstoredError.
func (l *Log) Close() error {
	l.mu.Lock()
	next, ended := l.next, errors.Is(l.err, commitlog.ErrClosed)
	l.mu.Unlock()
	if ended {
		return nil
	}
	err := l.Sync(next)
	switch {
	case errors.Is(err, ErrFenced):
		err = nil
	case err != nil:
		err = l.unstored(err)
	}
	l.fail(commitlog.ErrClosed)
	close(l.stop)
	<-l.done
	l.detach()
	l.cluster.closed(l)
	return err
}

func (l *Log) fail(err error) {
	l.mu.Lock()
	if l.err == nil || errors.Is(err, commitlog.ErrClosed) {
		l.err = err
	}
	l.mu.Unlock()
	l.changed.Broadcast()
}

// Fenced reports whether another broker has claimed the part.
func (l *Log) Fenced() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Is(l.err, ErrFenced)
}

// Stats implements commitlog.Files.
func (l *Log) Stats() commitlog.Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Next, s.Records = l.next, int64(l.next-s.First)
	s.Segments = int(s.Bytes / segment)
	s.Pending = int64(l.bytes)
	return s
}

func (l *Log) Name() string { return l.part.topic }

func (l *Log) log() *slog.Logger { return l.cluster.logOf(l.part) }
