package broker

import (
	"github.com/srtm-io/srtm/nsqd/diskqueue"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// inResume marks the tickets of what an earlier process had in memory (see
// Topic.resume), which are numbered apart from those of the line's queue.
const inResume queue.Ticket = 1 << 63

// tickets are the messages of a line that were read from disk and are not done
// with. They end in any order; the disk is released in its own.
//
// Invariant: open[i] is the message of ticket base+i; open[0], if there is one,
// is not done.
type tickets struct {
	base queue.Ticket // 0 only while no ticket was issued
	open []ticket     // a queue: appended to, and cut at the front
	upTo diskqueue.Position
	any  bool // upTo is set
}

type ticket struct {
	end  diskqueue.Position
	done bool
}

// issue returns the ticket of the next message, which ends at end on disk.
func (t *tickets) issue(end diskqueue.Position) queue.Ticket {
	if t.base == 0 {
		t.base = 1
	}
	t.open = append(t.open, ticket{end: end})
	return t.base + queue.Ticket(len(t.open)-1)
}

// done notes that a message is done with. One of an emptied line is ignored.
func (t *tickets) done(k queue.Ticket) {
	if k < t.base || k >= t.base+queue.Ticket(len(t.open)) {
		return
	}
	t.open[k-t.base].done = true
	n := 0
	for n < len(t.open) && t.open[n].done {
		n++
	}
	if n > 0 {
		t.upTo, t.any = t.open[n-1].end, true
		t.base += queue.Ticket(n)
		t.open = t.open[n:]
	}
}

// forget gives up the oldest tickets where more than so many are open: their
// messages are in memory alone.
func (t *tickets) forget(most int) {
	if n := len(t.open) - most; n > 0 {
		t.upTo, t.any = t.open[n-1].end, true
		t.base += queue.Ticket(n)
		t.open = t.open[n:]
	}
}

// void forgets all open tickets.
func (t *tickets) void() {
	t.base += queue.Ticket(len(t.open))
	t.open, t.any = nil, false
}

// doneUpTo returns the position before which everything is done with.
func (t *tickets) doneUpTo() (p diskqueue.Position, any bool) { return t.upTo, t.any }
