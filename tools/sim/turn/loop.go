package turn

import "time"

// loop is an event loop. Its steps are parts of a turn. A step's work happens at its end.
type loop struct {
	thread
	sim   *sim
	first bool // has the subscriber

	ready   []*conn         // with input, in the order of epoll
	events  []*conn         // of this turn, not read yet
	reads   int             // of this turn
	replies []*conn         // with messages that are executed and not answered
	outbox  []time.Duration // due times of messages for the subscriber
	posted  []time.Duration // from other loops, for the next turn
}

// conn is a connection: a publisher, or the subscriber with FINs.
type conn struct {
	subscriber bool
	number     int
	listed     bool            // in ready or events
	input      []time.Duration // due times of messages
	executed   []time.Duration // due times of messages to answer
}

// receive adds input to a connection of the loop.
func (l *loop) receive(c *conn, due ...time.Duration) {
	c.input = append(c.input, due...)
	if !c.listed {
		c.listed = true
		l.ready = append(l.ready, c)
	}
	l.wake()
}

func (l *loop) wake() {
	if !l.running {
		l.step(l.sim.Wake, l.turn)
	}
}

// turn begins a turn, or sleeps.
func (l *loop) turn() {
	l.reads = 0
	if len(l.ready)+len(l.posted)+len(l.replies) == 0 {
		l.sleep()
		return
	}
	l.step(l.sim.Wait, func() {
		n := min(len(l.ready), l.sim.Events)
		l.events = append(l.events, l.ready[:n]...)
		l.ready = l.ready[n:]
		l.sim.turns++
		l.sim.reads += n
		if l.sim.Turn.Finish {
			for i, c := range l.events {
				if c.subscriber {
					copy(l.events[1:i+1], l.events[:i])
					l.events[0] = c
				}
			}
		}
		l.outbox, l.posted = append(l.outbox, l.posted...), nil
		l.read()
	})
}

// read reads the next connection, or ends the turn with the output.
func (l *loop) read() {
	switch early := l.sim.Early; {
	case len(l.events) == 0 && (l.sim.Order == Last || len(l.replies) < l.sim.Long):
		l.reply(l.owed(), func() { l.deliver(l.turn) })
		return
	case len(l.events) == 0:
		l.deliver(func() { l.reply(l.owed(), l.turn) })
		return
	case early > 0 && l.reads >= early:
		l.reads = 0
		l.deliver(l.read)
		return
	}
	c := l.events[0]
	l.events = l.events[1:]
	n := min(len(c.input), l.sim.Commands)
	cost := l.sim.Read + time.Duration(n-1)*l.sim.Message
	if c.subscriber {
		n = len(c.input)
		cost = l.sim.FINs + time.Duration(n)*l.sim.Costs.Finish
	}
	if c.listed = len(c.input) > n; c.listed {
		l.ready = append(l.ready, c)
	}
	l.step(cost, func() {
		due := c.input[:n]
		c.input = c.input[n:]
		if !c.listed && len(c.input) > 0 { // input that came during the read
			c.listed = true
			l.ready = append(l.ready, c)
		}
		l.reads++
		if c.subscriber {
			l.read()
			return
		}
		if c.executed = append(c.executed, due...); len(c.executed) == len(due) {
			l.replies = append(l.replies, c)
		}
		l.handOver(due, func() {
			if l.sim.Order == Merged {
				l.reply(len(l.replies), l.read)
			} else {
				l.read()
			}
		})
	})
}

// handOver gives messages to the subscriber's loop.
func (l *loop) handOver(due []time.Duration, then func()) {
	if l.first {
		l.outbox = append(l.outbox, due...)
		then()
		return
	}
	l.step(l.sim.Post, func() {
		first := l.sim.loops[0]
		first.posted = append(first.posted, due...)
		first.wake()
		then()
	})
}

// owed returns the number of connections that the turn answers.
func (l *loop) owed() int {
	if n := l.sim.Replies; n > 0 {
		return max(n, len(l.replies)-l.sim.Owed)
	}
	return len(l.replies)
}

// reply answers the executed messages of at most n connections, with one write for a connection.
func (l *loop) reply(n int, then func()) {
	if len(l.replies) == 0 || n == 0 {
		then()
		return
	}
	c := l.replies[0]
	l.replies = l.replies[1:]
	l.step(l.sim.Reply, func() {
		for _, due := range c.executed {
			l.sim.replied.add(due, l.sim.now)
		}
		c.executed = c.executed[:0]
		if s := l.sim; s.Closed {
			if s.sender.idle = append(s.sender.idle, c.number); !s.sender.running {
				s.sender.step(s.Wake, s.send)
			}
		}
		l.reply(n-1, then)
	})
}

// deliver writes the messages of the outbox with one write.
func (l *loop) deliver(then func()) {
	if len(l.outbox) == 0 {
		then()
		return
	}
	due := l.outbox
	l.outbox = nil
	l.step(l.sim.Deliver+time.Duration(len(due))*l.sim.Encode, func() {
		l.sim.subscriber.socket = append(l.sim.subscriber.socket, due...)
		l.sim.subscriber.wake()
		then()
	})
}
