package queue

import (
	"cmp"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Expiry says when a message that no consumer finished is given up. The zero Expiry keeps every
// message until a consumer finishes it.
type Expiry struct {
	// TTL is the life of a message from its arrival; the time of a deferral counts. A channel
	// discards a message whose TTL is over instead of delivering it. A message that waits for
	// its token when its TTL is over leaves without a token. A message that a consumer holds
	// stays the consumer's. 0: no end.
	TTL time.Duration
	// MaxAttempts is the number of deliveries of a message in one channel. When that many
	// deliveries have failed the channel gives the message up. 0: no bound.
	MaxAttempts int
	// DeadLetters says that the owner gets a message with MaxAttempts failed deliveries
	// (Effects.Dead). Otherwise the channel discards the message.
	DeadLetters bool
}

// within returns the expiry of a channel with settings of its own in a topic with expiry t. A
// channel can shorten the topic's TTL and not lengthen it, so that a message whose TTL is over
// in the topic is over in each channel.
func (e Expiry) within(t Expiry) Expiry {
	if e.TTL == 0 || t.TTL > 0 && t.TTL < e.TTL {
		e.TTL = t.TTL
	}
	return Expiry{e.TTL, cmp.Or(e.MaxAttempts, t.MaxAttempts), e.DeadLetters || t.DeadLetters}
}

// ended reports whether the TTL of a message that arrived then is over.
func (e Expiry) ended(arrival, now mono.Time) bool { return e.TTL > 0 && now.Sub(arrival) >= e.TTL }

// end returns when the TTL of a message that arrived then is over; mono.Never without a TTL.
func (e Expiry) end(arrival mono.Time) mono.Time {
	if e.TTL == 0 {
		return mono.Never
	}
	return arrival.Add(e.TTL)
}

const (
	// maxBurying is how many dead letters of a channel the owner may have at a time. The
	// others wait for buryPause.
	maxBurying = 64
	buryPause  = time.Second
	// buryWithin is how long the owner has to store a dead letter. After that the channel
	// hands the letter out again.
	buryWithin = 30 * time.Second
)

// Dead is a message with Expiry.MaxAttempts failed deliveries, for the owner to store
// elsewhere. The owner calls Topic.Bury with each. Until then the channel holds the message as
// a deferred one, so a crash loses nothing.
type Dead struct {
	Message  *Message // the owner may read it until Bury
	Attempts uint16   // deliveries

	channel *Channel
	it      *item
	turn    uint64
}

// Channel returns the name of the channel that gave the message up.
func (d Dead) Channel() string { return d.channel.name }

// discardExpired ends ready messages at the front whose TTL is over or that have failed too
// often. A requeued message behind a younger one expires when its turn comes.
func (c *Channel) discardExpired(now mono.Time, fx *Effects) {
	for c.ready.len() > 0 {
		it := c.ready.front()
		switch {
		case c.expiry.ended(it.msg.Arrival, now):
			c.counters.Expired++
			c.ready.pop()
			c.done(it, fx)
		case c.expiry.MaxAttempts > 0 && int(it.attempts) >= c.expiry.MaxAttempts:
			c.ready.pop()
			c.giveUp(now, it, fx)
		default:
			return
		}
		if c.behind {
			c.catchUp(now)
		}
	}
}

// giveUp ends a message that has failed too often, or hands it to the owner.
func (c *Channel) giveUp(now mono.Time, it *item, fx *Effects) {
	if !c.expiry.DeadLetters {
		c.counters.GivenUp++
		c.done(it, fx)
		return
	}
	c.log.changes++
	if c.burying >= maxBurying {
		it.due = now.Add(buryPause)
		c.items.due.push(it)
		return
	}
	c.burying++
	c.turns++
	it.turn, it.due = c.turns, now.Add(buryWithin)
	c.items.due.push(it)
	it.msg.ref()
	fx.Dead = append(fx.Dead, Dead{Message: it.msg, Attempts: it.attempts, channel: c, it: it, turn: it.turn})
}

// unbury says that the owner's answer about a message does not count any more.
func (c *Channel) unbury(it *item) {
	if it.turn != 0 {
		c.burying--
		it.turn = 0
	}
}

// Bury ends a message of Effects.Dead that the owner has stored elsewhere. If the owner could
// not store it, the channel hands the message out again after retry. The owner must not use
// the message afterwards.
func (t *Topic) Bury(now mono.Time, d Dead, stored bool, retry time.Duration, fx *Effects) {
	c, it := d.channel, d.it
	if d.turn != 0 && it.turn == d.turn && it.holder == nil {
		c.unbury(it)
		c.items.due.remove(it)
		if stored {
			c.counters.DeadLettered++
			c.done(it, fx)
		} else {
			it.due = now.Add(retry)
			c.items.due.push(it)
		}
	}
	fx.unref(d.Message)
	t.settle(now, c, fx)
}

// SetExpiry sets when messages of the topic are given up, those that wait now included.
func (t *Topic) SetExpiry(now mono.Time, e Expiry, fx *Effects) {
	t.expiry = e
	for _, c := range t.channels {
		c.expiry = c.own.within(e)
		t.serve(now, c, fx)
	}
	t.advance(now, fx)
}

// SetChannelExpiry sets when messages of a channel are given up. Where e is zero, the topic's
// expiry holds.
func (t *Topic) SetChannelExpiry(now mono.Time, c *Channel, e Expiry, fx *Effects) {
	c.own, c.expiry = e, e.within(t.expiry)
	t.settle(now, c, fx)
}

// Expiry returns the topic's expiry.
func (t *Topic) Expiry() Expiry { return t.expiry }

// Expiry returns the channel's own settings, without the topic's.
func (c *Channel) Expiry() Expiry { return c.own }
