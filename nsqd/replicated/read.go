package replicated

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// mark is the position of a block.
type mark struct {
	offset commitlog.Offset // of the block's first record
	seq    uint64
	time   mono.Wall // when JetStream stored the block, by its clock; 0: unknown
	size   int64     // bytes that this owner has stored up to the block's end; 0: unknown
}

// marks are the known positions of some blocks, in order. They reduce the number of requests that
// find a place.
type marks struct {
	all   []mark
	first uint64 // sequence of the first block
	last  uint64 // of the newest block
	claim uint64 // this owner has stored every block from here on
	size  int64  // of this owner's blocks, in bytes
}

const mostMarks = 1 << 14

func (m *marks) add(k mark) {
	m.last = max(m.last, k.seq)
	i, known := slices.BinarySearchFunc(m.all, k.seq, func(m mark, seq uint64) int { return cmp.Compare(m.seq, seq) })
	if known {
		m.all[i].time = max(m.all[i].time, k.time)
		return
	}
	m.all = slices.Insert(m.all, i, k)
	if len(m.all) > mostMarks { // drop every second mark
		kept := m.all[:0]
		for i, k := range m.all {
			if i%2 == 0 || i == len(m.all)-1 {
				kept = append(kept, k)
			}
		}
		m.all = kept
	}
}

// locate reports whether a mark is before or after a place. Both results are false if the mark
// lacks the necessary field.
type locate func(mark) (before, after bool)

// atOffset is the place of the last block that begins at offset o or before.
func atOffset(o commitlog.Offset) locate {
	return func(k mark) (before, after bool) { return k.offset <= o, k.offset > o }
}

// atTime is the place of the last block stored by time t. Timestamps of records are not usable:
// a message that was carried forward or taken over is older than its predecessors, and the
// publisher's clock may have been wrong.
func atTime(t mono.Wall) locate {
	return func(k mark) (before, after bool) { return k.time > 0 && k.time <= t, k.time > t }
}

// around returns bounds of the last block before a place: its sequence is at least lo and below
// hi.
func (m *marks) around(locate locate) (lo, hi uint64) {
	lo, hi = m.first, m.last+1
	for _, k := range m.all {
		before, after := locate(k)
		if after {
			return lo, k.seq
		}
		if before {
			lo = max(lo, k.seq)
		}
	}
	return lo, hi
}

// holding returns the first sequence from which the stream holds at least the given bytes. all is
// the size of the stream. Blocks of previous owners are assumed to have equal sizes.
func (m *marks) holding(bytes, all int64) uint64 {
	for _, k := range slices.Backward(m.all) {
		if k.size > 0 && m.size-k.size >= bytes {
			return k.seq + 1
		}
	}
	claimed, size := int64(m.claim)-int64(m.first), all-m.size
	if claimed <= 0 || size <= 0 {
		return m.first
	}
	retained := float64(max(0, bytes-m.size)) / float64(size)
	return m.claim - uint64(min(claimed, int64(retained*float64(claimed))+1))
}

// trim forgets the marks before a sequence.
func (m *marks) trim(first uint64) {
	m.first = first
	m.all = slices.DeleteFunc(m.all, func(k mark) bool { return k.seq < first })
}

// place returns the sequence of the last stored block before a place, or of the first block if
// there is none.
func (l *Log) place(ctx context.Context, locate locate) (uint64, error) {
	l.mu.Lock()
	lo, hi := l.marks.around(locate)
	l.mu.Unlock()
	for hi-lo > 1 {
		mid := lo + (hi-lo)/2
		m, err := message(ctx, l.stream, mid, jetstream.WithGetMsgSubject(l.part.subject())) // or the next existing block
		if errors.Is(err, jetstream.ErrMsgNotFound) || err == nil && m.Sequence >= hi {
			hi = mid
			continue
		}
		if err != nil {
			return 0, err
		}
		k, err := markOf(m)
		if err != nil {
			return 0, err
		}
		l.mu.Lock()
		l.marks.add(k)
		l.mu.Unlock()
		if _, after := locate(k); after {
			hi = mid
		} else {
			lo = m.Sequence
		}
	}
	return lo, nil
}

func markOf(m *jetstream.RawStreamMsg) (mark, error) {
	h, err := parseHead(m.Data)
	return mark{offset: h.first, seq: m.Sequence, time: mono.Wall(m.Time.UnixNano())}, err
}

// readers is the number of concurrent requests for blocks.
const readers = 32

// Read implements commitlog.Log. It reads unstored records from memory.
func (l *Log) Read(start commitlog.Offset, limit commitlog.Limit, batch *commitlog.Batch) (err error) {
	batch.Records, batch.Next = batch.Records[:0], start
	defer func() {
		if err != nil {
			batch.Records, batch.Next = batch.Records[:0], start
			l.mu.Lock()
			l.stats.ReadErrors++
			l.mu.Unlock()
			err = fmt.Errorf("read topic %s: %w", l.part, err)
		}
	}()
	c := cut{records: max(1, limit.Records), bytes: max(1, limit.Bytes), into: batch}
	ctx, cancel := l.cluster.timeout(patience)
	defer cancel()
	for l.mu.Lock(); batch.Next < l.durable && !c.full && !errors.Is(l.err, commitlog.ErrClosed); l.mu.Lock() {
		durable, newest := l.durable, l.marks.last
		l.mu.Unlock()
		if err := l.readStream(ctx, newest, &c); err != nil {
			return err
		}
		if !c.full {
			batch.Next = max(batch.Next, durable) // the rest was trimmed
		}
	}
	defer l.mu.Unlock()
	if errors.Is(l.err, commitlog.ErrClosed) {
		return commitlog.ErrClosed
	}
	if batch.Next >= l.durable {
		for _, b := range l.pending {
			c.block(b.data, b.head)
		}
	}
	l.stats.Read += uint64(len(batch.Records))
	for i := range batch.Records {
		l.stats.ReadBytes += uint64(len(batch.Records[i].Body))
	}
	return nil
}

// cut gathers the records of one Read.
type cut struct {
	records, bytes int
	into           *commitlog.Batch
	full           bool
}

// block takes the records of a block that fit. The records refer to the bytes of b.
func (c *cut) block(b []byte, h head) {
	if h.next <= c.into.Next || c.full {
		return
	}
	for r := range records(b, h) {
		if r.Offset < c.into.Next {
			continue
		}
		if c.records == 0 || c.bytes < len(r.Body)+len(r.Attribute) && len(c.into.Records) > 0 {
			c.full = true
			return
		}
		c.into.Records = append(c.into.Records, r)
		c.into.Next = r.Offset + 1
		c.records--
		c.bytes -= len(r.Body) + len(r.Attribute)
	}
	if h.next > c.into.Next {
		c.into.Next = h.next
	}
	c.full = c.records <= 0 || c.bytes <= 0
}

// fetch returns up to n blocks from a sequence on, up to newest. A block that was trimmed or has
// disappeared is nil.
func (l *Log) fetch(ctx context.Context, seq, newest uint64, n int) ([]*jetstream.RawStreamMsg, error) {
	msgs := make([]*jetstream.RawStreamMsg, min(uint64(n), newest+1-min(seq, newest+1)))
	get := func(wanted func(seq uint64) bool, get func(context.Context, uint64) (*jetstream.RawStreamMsg, error)) error {
		all, asking := errgroup.WithContext(ctx)
		for i := range msgs {
			if missing := seq + uint64(i); msgs[i] == nil && wanted(missing) {
				all.Go(func() (err error) {
					msgs[i], err = get(asking, missing)
					return err
				})
			}
		}
		return all.Wait()
	}
	if err := get(func(uint64) bool { return true }, l.get); err != nil || !slices.Contains(msgs, nil) {
		return msgs, err
	}
	first, err := l.findFirst(ctx)
	if err != nil {
		return nil, err
	}
	// A block before first was trimmed, perhaps by another owner, or purged.
	return msgs, get(func(seq uint64) bool { return seq >= first }, l.getAgain)
}

// get returns a block, or nil if JetStream does not find the block.
func (l *Log) get(ctx context.Context, seq uint64) (*jetstream.RawStreamMsg, error) {
	m, err := message(ctx, l.stream, seq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	return m, err
}

// getAgain retries get for a block that was not found and not trimmed: an operator may have
// deleted the block, or the servers could not read it. getAgain counts a block that is gone.
func (l *Log) getAgain(ctx context.Context, seq uint64) (m *jetstream.RawStreamMsg, err error) {
	l.mu.Lock()
	gap := l.gaps[seq]
	l.mu.Unlock()
	for tries := 1; !gap && m == nil && err == nil; tries++ {
		if tries == sureGone {
			l.log().Error("a block of the stream is gone: its messages are skipped", "sequence", seq)
			l.mu.Lock()
			l.gaps[seq] = true
			l.stats.Unreadable++
			l.mu.Unlock()
			break
		}
		pause(ctx)
		m, err = l.get(ctx, seq)
	}
	return m, err
}

// readStream reads the stored blocks, up to newest.
func (l *Log) readStream(ctx context.Context, newest uint64, c *cut) error {
	seq, err := l.place(ctx, atOffset(c.into.Next))
	if err != nil {
		return err
	}
	for b, err := range l.blocks(ctx, seq, newest) {
		if err != nil {
			return err
		}
		c.block(b.data, b.head)
		if c.full {
			break
		}
	}
	return nil
}

// blocks yields the stored blocks from a sequence on, up to newest.
func (l *Log) blocks(ctx context.Context, seq, newest uint64) iter.Seq2[block, error] {
	return func(yield func(block, error) bool) {
		for n := 1; seq <= newest; n = readers { // the first block shows how large the blocks are
			msgs, err := l.fetch(ctx, seq, newest, n)
			if err != nil {
				yield(block{}, err)
				return
			}
			for _, m := range msgs {
				if m == nil {
					continue
				}
				h, err := parseHead(m.Data)
				if err != nil {
					err = fmt.Errorf("message %d of the stream: %w", m.Sequence, err)
				}
				if !yield(block{head: h, data: m.Data}, err) || err != nil {
					return
				}
			}
			l.mu.Lock()
			seq = max(seq+uint64(len(msgs)), l.marks.first) // an operator may have purged everything before
			l.mu.Unlock()
		}
	}
}

// purgeEvery is the minimum time between two purges by Trim. Trim purges a part that was taken
// over at once, because the purge shows the progress of the takeover.
const purgeEvery = time.Second

// lookEvery is how often Trim looks at the stream with nothing to trim.
const lookEvery = time.Minute

// findFirst records the beginning and the size of the stream, and returns the sequence of its first
// block. It counts blocks that were purged by an operator: blocks that are gone without a trim.
func (l *Log) findFirst(ctx context.Context) (seq uint64, err error) {
	l.mu.Lock()
	first, newest := l.durable, l.marks.last // first: for an empty stream
	l.mu.Unlock()
	info, m, err := l.oldest(ctx)
	if err != nil {
		return 0, err
	}
	if l.foreign() && info.State.LastSeq > newest { // the part's broker is back
		l.fail(ErrFenced)
		return 0, ErrFenced
	}
	if m != nil {
		h, err := parseHead(m.Data)
		if err != nil {
			return 0, err
		}
		first = h.first
	}
	seq = info.State.FirstSeq
	purged := func() uint64 { return uint64(first - min(first, max(l.stats.First, l.trimmed))) }
	l.mu.Lock()
	n := purged()
	l.mu.Unlock()
	if n > 0 {
		if h, last, err := l.newest(ctx); err != nil || !l.owns(h, last) { // another owner may have trimmed the stream
			return seq, err
		}
	}
	l.mu.Lock()
	if seq < l.marks.first { // a concurrent call has looked since
		l.mu.Unlock()
		return seq, nil
	}
	if n = purged(); seq <= l.marks.claim && time.Since(l.claimed) < 2*patience {
		n = 0 // the previous owner requested the purge before it knew of this owner
	}
	l.stats.Unreadable += n
	l.looked = time.Now()
	l.marks.trim(seq)
	maps.DeleteFunc(l.gaps, func(gap uint64, _ bool) bool { return gap < seq })
	l.stats.First, l.stats.Bytes = first, int64(info.State.Bytes)
	l.mu.Unlock()
	if n > 0 {
		l.log().Error("stream was purged; its messages are lost", obs.KeyCount, n)
	}
	return seq, nil
}

// Trim implements commitlog.Log. The newest block stays, because it holds the log's next offset.
func (l *Log) Trim(limit commitlog.Offset) error {
	l.keeping.Lock()
	defer l.keeping.Unlock()
	l.mu.Lock()
	if l.err != nil {
		l.mu.Unlock()
		return l.err
	}
	l.trimmed = max(l.trimmed, min(limit, l.next))
	target, retain := min(l.trimmed, l.durable), l.retain
	skip := target <= l.stats.First || !l.foreign() && time.Since(l.purged) < purgeEvery
	if skip && time.Since(l.looked) < lookEvery {
		l.mu.Unlock()
		return nil
	}
	bytes, first := l.stats.Bytes, l.marks.first
	if maxBytes := l.cluster.cfg.MaxBytes; maxBytes > 0 && bytes+int64(l.bytes) > maxBytes-maxBytes/4 {
		retain = commitlog.Retain{} // make room for new messages
	}
	if !skip {
		l.purged = time.Now()
	}
	l.mu.Unlock()
	ctx, cancel := l.cluster.timeout(patience)
	defer cancel()
	if skip {
		_, err := l.findFirst(ctx)
		return err
	}
	seq, err := l.place(ctx, atOffset(target))
	if err == nil && retain.Age > 0 {
		var info *jetstream.StreamInfo
		var aged uint64
		if info, err = infoOf(ctx, l.stream); err == nil {
			aged, err = l.place(ctx, atTime(mono.Wall(info.TimeStamp.Add(-retain.Age).UnixNano())))
		}
		seq = min(seq, aged)
	}
	if retain.Bytes > 0 {
		l.mu.Lock()
		seq = min(seq, l.marks.holding(retain.Bytes, bytes))
		l.mu.Unlock()
	}
	if err != nil || seq <= first {
		return err
	}
	if err := purge(ctx, l.stream, jetstream.WithPurgeSequence(seq)); err != nil {
		return fmt.Errorf("trim topic %s: %w", l.part, err)
	}
	if _, err := l.findFirst(ctx); err != nil {
		return err
	}
	l.mu.Lock()
	l.stats.Trimmed++
	l.mu.Unlock()
	return nil
}

// maxSkew is the assumed maximum difference between the clocks of brokers and NATS servers.
const maxSkew = mono.Wall(10 * time.Second)

// At implements commitlog.Files.
func (l *Log) At(t mono.Wall) (commitlog.Offset, error) {
	ctx, cancel := l.cluster.timeout(patience)
	defer cancel()
	seq, err := l.place(ctx, atTime(t-maxSkew))
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	newest := l.marks.last
	l.mu.Unlock()
	for b, err := range l.blocks(ctx, seq, newest) {
		if err != nil {
			return 0, err
		}
		if at, ok := firstSince(b.data, b.head, t); ok {
			return at, nil
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.pending {
		if at, ok := firstSince(b.data, b.head, t); ok {
			return at, nil
		}
	}
	return l.next, nil
}

func firstSince(b []byte, h head, t mono.Wall) (commitlog.Offset, bool) {
	for r := range records(b, h) {
		if r.Timestamp >= t {
			return r.Offset, true
		}
	}
	return 0, false
}

// Need implements commitlog.Files. Trimmed records do not come back.
func (l *Log) Need(start commitlog.Offset) commitlog.Offset {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trimmed = min(l.trimmed, max(start, l.stats.First))
	return l.stats.First
}

// Records implements commitlog.Files.
func (l *Log) Records(start commitlog.Offset) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return int64(l.next - min(max(start, l.stats.First), l.next))
}

// Size returns the size of the stream in bytes, on each replica.
func (l *Log) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stats.Bytes + int64(l.bytes)
}

// Needed estimates the part of Size that is not merely retained, in proportion to the offsets.
func (l *Log) Needed() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.next == l.stats.First {
		return 0
	}
	return int64(float64(l.stats.Bytes+int64(l.bytes)) * float64(l.next-max(l.trimmed, l.stats.First)) / float64(l.next-l.stats.First))
}

// SetRetain implements commitlog.Files.
func (l *Log) SetRetain(r commitlog.Retain) {
	l.mu.Lock()
	l.retain = r
	l.mu.Unlock()
}

// Rest implements commitlog.Files. It has nothing to release.
func (l *Log) Rest() error { return nil }
