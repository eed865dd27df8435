package diskqueue

import (
	"errors"
	"io"
)

// Last returns the last record, whether it was released or not; nil if the queue
// has none, or if it cannot be told which one that is since there is damage. It
// reads a segment.
func (q *Queue) Last() ([]byte, error) {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return nil, ErrClosed
	}
	if len(q.segments) == 0 {
		q.mu.Unlock()
		return nil, nil
	}
	s := q.segments[len(q.segments)-1]
	end, damaged := s.end, s.damaged || s.bad
	q.mu.Unlock()
	if damaged {
		return nil, nil
	}
	file, err := q.use(s)
	if err != nil {
		return nil, err
	}
	defer q.done(s)
	w := walker{layout: s.layout, r: file, off: headerSize, at: headerSize, end: end, window: readWindow}
	var last []byte
	for {
		data, err := w.next()
		switch {
		case err == nil:
			last = append(last[:0], data...)
		case errors.Is(err, io.EOF):
			return last, nil
		case errors.Is(err, errDamaged):
			return nil, nil
		default:
			return nil, err
		}
	}
}

// KeepLast says whether Checkpoint has to leave the last record in its file when
// everything is released: it tells how far the queue has come.
func (q *Queue) KeepLast(keep bool) {
	q.mu.Lock()
	q.keepLast = keep
	q.mu.Unlock()
}

// Checkpointed reports whether all that was ever appended is released, and that
// is durable: reopened, the queue would have nothing to read.
func (q *Queue) Checkpointed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return !q.kept.Before(q.last())
}
