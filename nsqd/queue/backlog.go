package queue

// backlog is the topic's own cursor, behind which messages wait for tokens or for a channel.
//
// Invariants, checked by checkInvariants in tests:
//   - accepted == released + expired + Waiting + emptied + lost;
//   - under a contract, what is in memory is in order of arrival, so that none behind the
//     head has a token before it.
type backlog struct {
	log       *log             // set once
	byArrival bool             // there is a contract
	waiting   ring[*Message]   // the part that is in memory
	window    window[*Message] // likewise, by offset
	absent    ring[Offset]     // what waited there in an earlier process and was not read yet
	behind    bool
	late      int  // messages from the window's end on
	passed    bool // something that is for one channel only

	// In windows: of what was in memory in an earlier process and is not read yet, and,
	// in a channel's, of what is not released yet.
	unread  *Message // nil until Restore
	pending *item    // nil until there is one

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
func (b *backlog) Counters() Counters { return b.counters }

// Waiting is the number of messages that wait for tokens or for a channel, in
// memory or beyond.
func (b *backlog) Waiting() int { return b.waiting.len() + b.Beyond() }

// Beyond is how many of them are not in memory.
func (b *backlog) Beyond() int { return b.late + b.absent.len() }

// Waits reports whether a message has no token yet: what is known of its release
// is to be written only after that. Requires: it is the machine's.
func (b *backlog) Waits(m *Message) bool { return b.window.get(m.Offset) == m }

// TakeMaxWaiting returns the maximum of Waiting since the last call.
func (b *backlog) TakeMaxWaiting() int {
	most := max(b.maxWaiting, b.Waiting())
	b.maxWaiting = b.Waiting()
	return most
}

// Refuse counts n messages that are not accepted, because of err, which it
// returns.
func (b *backlog) Refuse(err error, n int) error {
	b.counters.Refused += uint64(n)
	return err
}

// accepted counts a message that is accepted.
func (b *backlog) accepted(m *Message) {
	b.counters.Accepted++
	b.counters.AcceptedBytes += uint64(len(m.Body))
}

// fallBehind says that a message is accepted which memory does not take.
func (b *backlog) fallBehind() {
	b.behind = true
	b.late++
}

// free is how many messages may go into memory and overtake none.
func (b *backlog) free() int {
	l := b.log
	if b.behind || l.tight || b.absent.len() > 0 {
		return 0
	}
	n := b.space(l.cfg.Capacity)
	if l.retained && l.logged() && !l.cfg.WriteThrough {
		return min(n, max(0, l.cfg.Overflow-l.tail.underWay))
	}
	return n
}

// space is how many messages memory may still take, if it may have so many.
func (b *backlog) space(most int) int { return max(0, most-b.waiting.len()) }

// wait takes a message into memory: at the end, or where it arrived, if there is a contract.
// Readers come to their messages late and in an order of their own; what came first has a
// token first.
func (b *backlog) wait(m *Message) {
	m.ref()
	i := b.waiting.len()
	if b.byArrival {
		i = b.waiting.after(m, laterArrival)
	}
	b.waiting.insert(i, m)
	if !b.log.logged() {
		return
	}
	if w := &b.window; m.Offset < w.end() {
		w.set(m.Offset, m) // it was unread
	} else {
		w.reach(m.Offset)
		w.push(m)
	}
}

func laterArrival(a, b *Message) bool { return b.Arrival.Before(a.Arrival) }

// sort is for a contract that begins.
func (b *backlog) sort() {
	b.byArrival = true
	b.waiting.sort(laterArrival)
}

// pop takes the head out, which is released.
func (b *backlog) pop() {
	m := b.waiting.pop()
	b.window.done(m.Offset)
	b.counters.Released++
}

// pends is in channels' windows where the message is not released yet.
func (b *backlog) pends() *item {
	if b.pending == nil {
		b.pending = new(item)
	}
	return b.pending
}

func (b *backlog) isPending(it *item) bool { return it != nil && it == b.pending }

// wants returns what the backlog has to get from the log, and from where, if memory may
// have so many messages: nothing until half of it is free, so that it comes in batches.
func (b *backlog) wants(most int) (from Offset, n int) {
	if b.absent.len() == 0 && (!b.behind || b.log.known(b.window.end())) {
		return 0, 0
	}
	if n = b.space(most); !b.log.tight && 2*n < b.log.cfg.Capacity {
		return 0, 0
	}
	if b.absent.len() > 0 {
		return b.absent.front(), n
	}
	return b.window.end(), n
}

// refill takes what was read from the log, as Topic.Refill, if memory may have so many
// messages. channels are told what is lost.
func (b *backlog) refill(from, upTo Offset, msgs []*Message, most int, channels []*Channel) {
	var m *Message
	for i := 0; b.absent.len() > 0; {
		o := b.absent.front()
		if o < from || o >= upTo {
			return
		}
		if m, i = at(msgs, i, o); m == nil {
			b.absent.pop()
			b.counters.Lost++
			b.lose(o, channels)
			continue
		}
		if b.space(most) <= 0 {
			return
		}
		b.absent.pop()
		b.wait(m)
	}
	b.catchUp(most)
}

// lose says that what waited at an offset will not be released.
func (b *backlog) lose(o Offset, channels []*Channel) {
	b.window.done(o)
	for _, c := range channels {
		if c.tracked && b.isPending(c.window.get(o)) {
			c.window.done(o)
		}
	}
}

// catchUp takes what the backlog is behind with and is in memory, if it may have so many
// messages there.
func (b *backlog) catchUp(most int) {
	l := b.log
	for b.behind && b.absent.len() == 0 {
		o := b.window.end()
		if o >= l.end {
			b.behind = false
			b.counters.Lost += uint64(max(0, b.late))
			b.counters.Accepted += uint64(max(0, -b.late)) // more than an earlier process knew of
			b.late = 0
			l.read.moved = true
			return
		}
		if !l.known(o) {
			return
		}
		m, none := l.next(o)
		switch {
		case m == nil:
			b.window.reach(none)
		case m.Only != nil:
			b.passed = b.passed || o < l.tail.next
			b.window.reach(m.Offset + 1)
		case b.space(most) <= 0:
			return
		default:
			b.late--
			b.wait(m)
		}
	}
}

// empty discards what waits, and returns how many messages that was.
func (b *backlog) empty(fx *Effects) int {
	n, l := b.Waiting(), b.log
	for o := b.window.next; o < b.window.end(); o++ {
		if b.window.get(o) != nil {
			l.avoid(o, o+1)
		}
	}
	l.avoid(b.window.end(), l.end)
	for i := range b.waiting.len() {
		fx.unref(b.waiting.at(i))
	}
	b.waiting.clear()
	b.absent.clear()
	b.window = window[*Message]{next: l.end}
	b.behind, b.late = false, 0
	b.counters.Emptied += uint64(n)
	return n
}
