package conn

import (
	"container/heap"
	"errors"

	"github.com/srtm-io/srtm/internal/mono"
)

// timerHeap orders connections by their next timer.
type timerHeap []*slot

func (h timerHeap) next() mono.Time {
	if len(h) == 0 {
		return mono.Never
	}
	return h[0].checkAt
}

// noLater makes expire check the connection at the given time or earlier. A timer that moves to a
// later time keeps its place, because an early check is cheap.
func (h *timerHeap) noLater(s *slot, at mono.Time) {
	switch {
	case s.heapIndex < 0 && at != mono.Never:
		s.checkAt = at
		heap.Push(h, s)
	case s.heapIndex >= 0 && at < s.checkAt:
		s.checkAt = at
		heap.Fix(h, s.heapIndex)
	}
}

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].checkAt < h[j].checkAt }
func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].heapIndex, h[j].heapIndex = i, j
}

func (h *timerHeap) Push(x any) {
	s := x.(*slot)
	s.heapIndex = len(*h)
	*h = append(*h, s)
}

func (h *timerHeap) Pop() any {
	last := len(*h) - 1
	s := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	s.heapIndex = -1
	return s
}

// nextTimer returns the time of the connection's next timer.
func (s *slot) nextTimer() mono.Time {
	next := mono.Never
	switch s.phase {
	case open:
		next = s.client.sess.Deadline()
	case lingering:
		next = s.lingerEnd
	}
	if len(s.pending) > 0 {
		next = min(next, s.writeBy)
	}
	return next
}

var errWriteTimeout = errors.New("the peer reads nothing")

// expire handles the connections whose timers are due.
func (l *loop) expire(now mono.Time) {
	for len(l.timers) > 0 && !now.Before(l.timers[0].checkAt) {
		s := l.timers[0]
		if s.offloaded { // the offloaded operation owns the session, so heartbeats wait
			if s.peerClosed && !s.fdClosed && !now.Before(s.lingerEnd) {
				l.abandon(s)
			}
			s.checkAt = now.Add(lingerTime)
			heap.Fix(&l.timers, s.heapIndex)
			continue
		}
		switch next := s.nextTimer(); {
		case now.Before(next):
		case s.phase == lingering:
			l.shut(s)
			continue
		case len(s.pending) > 0 && !now.Before(s.writeBy):
			l.fail(s, errWriteTimeout)
			continue
		default:
			s.client.sess.Tick(now)
			l.markDirty(s)
		}
		if s.checkAt = s.nextTimer(); s.checkAt == mono.Never {
			heap.Remove(&l.timers, s.heapIndex)
		} else {
			heap.Fix(&l.timers, s.heapIndex)
		}
	}
	l.flushAll()
}
