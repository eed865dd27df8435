package replicated

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/srtm-io/srtm/nsqd/commitlog"
)

// One stream holds the cursors of all parts, by subject. The newest message of <prefix>.head is a
// part's snapshot. If the snapshot is too long for one message, the head refers to messages of
// <prefix>.0.* or <prefix>.1.*. The two slots alternate, so the previous snapshot stays complete
// until a new head names the next.
//
//	 0      1  0xB2
//	 1      1  version, 1
//	 2      2  number of messages of the snapshot; 0: the snapshot follows
//	 4      8  epoch of the owner
//	12      8  number of the snapshot; an even number is in slot 0
//	20      8  the log's next offset
//	28      4  crc of the snapshot (CRC-32C)
//	32      1  1: there is a snapshot; 0: no snapshot was saved yet
//	33         the snapshot
const (
	cursorMagic   = 0xB2
	cursorVersion = 1
	cursorHeader  = 33
	mostChunks    = 4096
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// cursors saves the snapshots of a part for its owner.
type cursors struct {
	// Set once.
	cluster *Cluster
	part    part
	epoch   uint64 // of the owner
	// owned returns ErrFenced if another owner has claimed the part's log.
	owned func(context.Context) error

	// The owner's knowledge of the head.
	seq    uint64 // of the head in the stream; 0: there is no head
	number uint64
	saved  bool
	data   []byte // the newest snapshot, found at the claim or saved since
}

type cursorHead struct {
	chunks        uint16
	epoch, number uint64
	next          commitlog.Offset
	crc           uint32
	saved         bool
}

func (h cursorHead) append(dst []byte) []byte {
	dst = append(dst, cursorMagic, cursorVersion)
	dst = binary.BigEndian.AppendUint16(dst, h.chunks)
	dst = binary.BigEndian.AppendUint64(dst, h.epoch)
	dst = binary.BigEndian.AppendUint64(dst, h.number)
	dst = binary.BigEndian.AppendUint64(dst, uint64(h.next))
	dst = binary.BigEndian.AppendUint32(dst, h.crc)
	saved := byte(0)
	if h.saved {
		saved = 1
	}
	return append(dst, saved)
}

func parseCursorHead(b []byte) (cursorHead, []byte, error) {
	if len(b) < cursorHeader || b[0] != cursorMagic || b[1] != cursorVersion {
		return cursorHead{}, nil, errors.New("not a snapshot of cursors")
	}
	return cursorHead{
		chunks: binary.BigEndian.Uint16(b[2:]),
		epoch:  binary.BigEndian.Uint64(b[4:]),
		number: binary.BigEndian.Uint64(b[12:]),
		next:   commitlog.Offset(binary.BigEndian.Uint64(b[20:])),
		crc:    binary.BigEndian.Uint32(b[28:]),
		saved:  b[32] == 1,
	}, b[cursorHeader:], nil
}

func (c *cursors) chunkSubject(number uint64, i int) string {
	return fmt.Sprintf("%s.%d.%d", c.part.cursors(), number%2, i)
}

// find returns the newest head, its snapshot, and the head's sequence in the stream; 0:
// there is no head.
func (c *cursors) find(ctx context.Context) (h cursorHead, body []byte, seq uint64, err error) {
	m, err := newest(ctx, c.cluster.cursors, c.part.cursors()+".head")
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return h, nil, 0, nil
	}
	if err != nil {
		return h, nil, 0, err
	}
	if h, body, err = parseCursorHead(m.Data); err != nil {
		return h, nil, 0, err
	}
	for i := range h.chunks {
		chunk, err := newest(ctx, c.cluster.cursors, c.chunkSubject(h.number, int(i)))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			body = nil
			break
		}
		if err != nil {
			return h, nil, 0, fmt.Errorf("part %d of %d of the cursors: %w", i+1, h.chunks, err)
		}
		body = append(body, chunk.Data...)
	}
	if h.saved && crc32.Checksum(body, castagnoli) != h.crc {
		c.cluster.logOf(c.part).Error("the snapshot of the cursors is damaged: all that is in the log is delivered again")
		h.saved = false
	}
	return h, body, m.Sequence, nil
}

// claim makes this owner the only owner that may save cursors. Requires: the log already
// belongs to this owner. An owner that loses only the cursors would abandon its stored records.
func (c *cursors) claim(ctx context.Context) error {
	for {
		h, body, seq, err := c.find(ctx)
		if err != nil {
			return err
		}
		if h.epoch > c.epoch {
			return fmt.Errorf("%w: epoch %d, its cursors are at %d", ErrFenced, c.epoch, h.epoch)
		}
		h.epoch = c.epoch
		msg := h.append(nil)
		if h.chunks == 0 {
			msg = append(msg, body...)
		}
		ack, err := c.cluster.claimed(ctx, c.part.cursors()+".head", msg, jetstream.WithExpectLastSequencePerSubject(seq))
		if wrongSequence(err) {
			continue
		}
		if err != nil {
			return err
		}
		c.seq, c.number, c.saved, c.data = ack.Sequence, h.number, h.saved, body
		return nil
	}
}

// LoadCursors implements commitlog.Log. It returns the snapshot found at the claim or saved
// since.
func (l *Log) LoadCursors() ([]byte, error) {
	l.keeping.Lock()
	defer l.keeping.Unlock()
	if !l.cursors.saved {
		return nil, nil
	}
	return append([]byte{}, l.cursors.data...), nil
}

// SaveCursors implements commitlog.Log. Most replicas of the stream acknowledge the snapshot.
// While the stream has no leader, SaveCursors fails with ErrUnavailable after half a second,
// because the caller has other work.
func (l *Log) SaveCursors(snapshot []byte) error {
	l.keeping.Lock()
	defer l.keeping.Unlock()
	l.mu.Lock()
	err, next := l.err, l.next
	l.mu.Unlock()
	if err != nil {
		return err
	}
	if err := l.cursors.save(snapshot, next); err != nil {
		l.mu.Lock()
		l.stats.KeepErrors++
		l.mu.Unlock()
		switch {
		case errors.Is(err, ErrFenced):
			l.fail(ErrFenced)
		case l.cluster.ctx.Err() != nil:
			err = context.Cause(l.cluster.ctx)
		case errors.Is(err, jetstream.ErrNoStreamResponse):
			ctx, cancel := l.cluster.timeout(time.Second)
			defer cancel()
			l.cluster.remakeCursors(ctx)
			err = fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		return fmt.Errorf("save cursors of topic %s: %w", l.part, err)
	}
	l.cursors.saved, l.cursors.data = true, append(l.cursors.data[:0], snapshot...)
	l.mu.Lock()
	l.stats.Saves++
	l.stats.SavedBytes += uint64(len(snapshot))
	l.mu.Unlock()
	return nil
}

// save stores a snapshot of a log with the given next offset.
func (c *cursors) save(snapshot []byte, next commitlog.Offset) error {
	ctx, cancel := c.cluster.timeout(patience)
	defer cancel()
	h := cursorHead{epoch: c.epoch, number: c.number + 1, next: next, crc: crc32.Checksum(snapshot, castagnoli), saved: true}
	msg, size := snapshot, int(c.cluster.nc.MaxPayload())-1024
	if len(snapshot)+cursorHeader > size {
		n := (len(snapshot) + size - 1) / size
		if n > mostChunks {
			return fmt.Errorf("a snapshot of %d bytes, with %d bytes at a time", len(snapshot), size)
		}
		h.chunks, msg = uint16(n), nil
		for i := range n {
			chunk := snapshot[i*size : min((i+1)*size, len(snapshot))]
			if _, err := c.cluster.js.Publish(ctx, c.chunkSubject(h.number, i), chunk); err != nil {
				return err
			}
		}
	}
	head := append(h.append(nil), msg...)
	for retry := false; ; retry = true {
		ack, err := c.cluster.js.Publish(ctx, c.part.cursors()+".head", head, jetstream.WithExpectLastSequencePerSubject(c.seq))
		if err == nil {
			c.seq, c.number = ack.Sequence, h.number
			return nil
		}
		if !wrongSequence(err) {
			return err
		}
		if stored, err := c.lookAtHead(ctx, h.epoch, head); stored || err != nil {
			return err
		}
		if retry {
			return errors.New("an earlier snapshot was stored only now; it is saved again")
		}
	}
}

// lookAtHead finds out why JetStream refused a head, and reports whether an earlier try stored
// the head and lost the acknowledgement. An earlier try may also have stored another snapshot of
// this owner; the next try then follows that snapshot. If another owner has claimed the part, the
// error is ErrFenced.
func (c *cursors) lookAtHead(ctx context.Context, epoch uint64, written []byte) (stored bool, err error) {
	m, err := newest(ctx, c.cluster.cursors, c.part.cursors()+".head")
	if errors.Is(err, jetstream.ErrMsgNotFound) { // another owner or an operator has removed the head
		c.seq = 0
		return false, c.owned(ctx)
	}
	if err != nil {
		return false, err
	}
	h, _, err := parseCursorHead(m.Data)
	if err != nil {
		return false, err
	}
	if h.epoch != epoch {
		return false, ErrFenced
	}
	c.seq, c.number = m.Sequence, h.number
	return bytes.Equal(m.Data, written), nil
}

// remove removes the cursors that this owner has claimed, unless another owner has claimed
// them since.
func (c *cursors) remove(ctx context.Context) error {
	head, upTo := c.part.cursors()+".head", jetstream.WithPurgeSequence(c.seq+1)
	if err := purge(ctx, c.cluster.cursors, jetstream.WithPurgeSubject(head), upTo); err != nil {
		return err
	}
	_, err := newest(ctx, c.cluster.cursors, head)
	if !errors.Is(err, jetstream.ErrMsgNotFound) {
		return err // another owner may need the messages that its head names
	}
	return purge(ctx, c.cluster.cursors, jetstream.WithPurgeSubject(c.part.cursors()+".>"), upTo)
}
