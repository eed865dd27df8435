package queue

import "github.com/srtm-io/srtm/internal/container"

// Backlog is the topic's own cursor. Messages behind the cursor wait for tokens or for a channel.
//
// Invariants, checked by checkInvariants in tests:
//   - accepted == released + expired + Waiting + emptied + lost;
//   - under a contract, the messages in memory are in order of arrival, so no message gets its
//     token before the head.
type Backlog struct {
	log       *Log                      // set once
	byArrival bool                      // the topic has a contract
	waiting   container.Queue[*Message] // the messages in memory
	window    window[*Message]          // the messages in memory, by offset
	absent    container.Queue[Offset]   // messages of an earlier process that were not read yet
	behind    bool
	late      int  // messages from the window's end on
	foreign   bool // the backlog passed a message for one channel alone

	// Placeholders in windows: unread for messages of an earlier process that were not read yet;
	// pending, in a channel's window, for messages that were not released yet.
	unread, pending *Message // nil until first used

	counters   Counters
	maxWaiting int // since the last TakeMaxWaiting
}

// Counters only grow.
type Counters struct {
	Accepted      uint64 // messages
	AcceptedBytes uint64 // of bodies
	Released      uint64 // by a token, or without a contract
	Expired       uint64 // left without a token: TTL over
	Refused       uint64 // queue full or over limit
	Emptied       uint64 // discarded by Empty, on an operator's order
	Lost          uint64 // could not be read back from disk
}

// Counters returns the topic's counters.
func (b *Backlog) Counters() Counters { return b.counters }

// Waiting returns the number of messages that wait for tokens or for a channel, in memory or on
// disk.
func (b *Backlog) Waiting() int { return b.waiting.Len() + b.Beyond() }

// Beyond returns the number of waiting messages that are not in memory.
func (b *Backlog) Beyond() int { return b.late + b.absent.Len() }

// Waits reports whether a message has no token yet. The owner records the release of a message
// only after Waits returns false. Requires: the message belongs to the machine.
func (b *Backlog) Waits(m *Message) bool { return b.window.get(m.Offset) == m }

// TakeMaxWaiting returns the maximum of Waiting since the last call.
func (b *Backlog) TakeMaxWaiting() int {
	most := max(b.maxWaiting, b.Waiting())
	b.maxWaiting = b.Waiting()
	return most
}

// Refuse counts n messages refused because of err, and returns err.
func (b *Backlog) Refuse(err error, n int) error {
	b.counters.Refused += uint64(n)
	return err
}

func (b *Backlog) accepted(m *Message) {
	b.counters.Accepted++
	b.counters.AcceptedBytes += uint64(len(m.Body))
}

// fallBehind counts an accepted message that has no room in memory.
func (b *Backlog) fallBehind() {
	b.behind = true
	b.late++
}

// Free returns how many messages may go into memory without overtaking another message.
func (b *Backlog) Free() int {
	l := b.log
	if b.behind || l.tight || b.absent.Len() > 0 {
		return 0
	}
	n := b.space(l.cfg.Capacity)
	if l.retained && l.logged() && !l.cfg.WriteThrough {
		return min(n, max(0, l.cfg.Overflow-l.tail.underWay))
	}
	return n
}

// Room reports whether Topic.Put would have room for n messages now.
func (b *Backlog) Room(n int) bool {
	n -= b.Free()
	return n <= 0 || b.log.room(n)
}

// space returns how many more messages memory may take, if most is the maximum.
func (b *Backlog) space(most int) int { return max(0, most-b.waiting.Len()) }

// wait takes a message into memory: at the end, or in order of arrival under a contract. Readers
// of connections deliver messages late and out of order, and the earliest arrival gets its token
// first.
func (b *Backlog) wait(m *Message) {
	m.ref()
	i := b.waiting.Len()
	if b.byArrival {
		i = b.waiting.After(m, laterArrival)
	}
	b.waiting.Insert(i, m)
	if !b.log.logged() {
		return
	}
	if w := &b.window; m.Offset < w.end() {
		w.set(m.Offset, m) // the slot was unread
	} else {
		w.reach(m.Offset)
		w.push(m)
	}
}

func laterArrival(a, b *Message) bool { return b.Arrival.Before(a.Arrival) }

// sort orders the backlog when a contract begins.
func (b *Backlog) sort() {
	b.byArrival = true
	b.waiting.Sort(laterArrival)
}

func (b *Backlog) pop() {
	m := b.waiting.Pop()
	b.window.done(m.Offset)
	b.counters.Released++
}

// notReleased returns the placeholder pending.
func (b *Backlog) notReleased() *Message {
	if b.pending == nil {
		b.pending = new(Message)
	}
	return b.pending
}

// notRead returns the placeholder unread.
func (b *Backlog) notRead() *Message {
	if b.unread == nil {
		b.unread = new(Message)
	}
	return b.unread
}

func (b *Backlog) isPending(m *Message) bool { return m != nil && m == b.pending }

func (b *Backlog) isUnread(m *Message) bool { return m != nil && m == b.unread }

// wants returns the offset and the number of messages that the backlog needs from the log. most
// is the maximum in memory. Until half of the memory is free the backlog needs nothing, so reads
// come in batches.
func (b *Backlog) wants(most int) (from Offset, n int) {
	if b.absent.Len() == 0 && (!b.behind || b.log.hasRead(b.window.end())) {
		return 0, 0
	}
	if n = b.space(most); !b.log.tight && 2*n < b.log.cfg.Capacity {
		return 0, 0
	}
	if b.absent.Len() > 0 {
		return b.absent.Front(), n
	}
	return b.window.end(), n
}

// refill takes messages read from the log, as Disk.Refill does. most is the maximum in memory.
// refill reports lost messages to channels.
func (b *Backlog) refill(from, upTo Offset, msgs []*Message, most int, channels []*Channel) {
	var m *Message
	for i := 0; b.absent.Len() > 0; {
		o := b.absent.Front()
		if o < from || o >= upTo {
			return
		}
		if m, i = messageAt(msgs, i, o); m == nil {
			b.absent.Pop()
			b.counters.Lost++
			b.lose(o, channels)
			continue
		}
		if b.space(most) <= 0 {
			return
		}
		b.absent.Pop()
		b.wait(m)
	}
	b.catchUp(most)
}

// lose ends the wait of a lost message.
func (b *Backlog) lose(o Offset, channels []*Channel) {
	b.window.done(o)
	for _, c := range channels {
		if c.cursor.tracked && b.isPending(c.cursor.window.get(o)) {
			c.cursor.window.done(o)
		}
	}
}

// catchUp moves the cursor over messages that are in memory, until most messages wait in memory.
func (b *Backlog) catchUp(most int) {
	l := b.log
	for b.behind && b.absent.Len() == 0 {
		o := b.window.end()
		if o >= l.end {
			b.behind = false
			b.counters.Lost += uint64(max(0, b.late))
			b.counters.Accepted += uint64(max(0, -b.late)) // more than an earlier process knew of
			b.late = 0
			l.read.moved = true
			return
		}
		if !l.hasRead(o) {
			return
		}
		m, none := l.next(o)
		switch {
		case m == nil:
			b.window.reach(none)
		case m.Only != nil:
			b.foreign = b.foreign || o < l.tail.window.next
			b.window.reach(m.Offset + 1)
		case b.space(most) <= 0:
			return
		default:
			b.late--
			b.wait(m)
		}
	}
}

// empty discards the waiting messages and returns their number.
func (b *Backlog) empty(fx *Effects) int {
	n, l := b.Waiting(), b.log
	for o := b.window.next; o < b.window.end(); o++ {
		if b.window.get(o) != nil {
			l.skip(o, o+1)
		}
	}
	l.skip(b.window.end(), l.end)
	for i := range b.waiting.Len() {
		fx.unref(b.waiting.At(i))
	}
	b.waiting.Clear()
	b.absent.Clear()
	b.window = window[*Message]{next: l.end}
	b.behind, b.late = false, 0
	b.counters.Emptied += uint64(n)
	return n
}
