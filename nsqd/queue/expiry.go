package queue

import (
	"cmp"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Expiry is when the topic or channel gives up a message that no consumer finished. The zero
// Expiry keeps every message until a consumer finishes it.
type Expiry struct {
	// TTL is the life of a message from its arrival, including a deferral. A channel discards an
	// expired message instead of delivering it. An expired message that waits for its token
	// leaves without a token. A message that a consumer holds stays with the consumer. 0: no end.
	TTL time.Duration
	// MaxAttempts is the number of failed deliveries after which a channel gives the message up.
	// 0: no bound.
	MaxAttempts int
	// DeadLetters gives a message with MaxAttempts failed deliveries to the owner (Effects.Dead).
	// Otherwise the channel discards the message.
	DeadLetters bool
}

// within combines a channel's own settings e with the topic's expiry t. A channel can shorten the
// topic's TTL but not lengthen it, so a message that expired in the topic has expired in each
// channel.
func (e Expiry) within(t Expiry) Expiry {
	if e.TTL == 0 || t.TTL > 0 && t.TTL < e.TTL {
		e.TTL = t.TTL
	}
	return Expiry{e.TTL, cmp.Or(e.MaxAttempts, t.MaxAttempts), e.DeadLetters || t.DeadLetters}
}

// ended reports whether the TTL of a message is over.
func (e Expiry) ended(arrival, now mono.Time) bool { return e.TTL > 0 && now.Sub(arrival) >= e.TTL }

// end returns when the TTL of a message is over; mono.Never without a TTL.
func (e Expiry) end(arrival mono.Time) mono.Time {
	if e.TTL == 0 {
		return mono.Never
	}
	return arrival.Add(e.TTL)
}

const (
	// maxBurying is the number of dead letters of a channel that the owner may be storing at a
	// time. The other dead letters wait for buryPause.
	maxBurying = 64
	buryPause  = time.Second
	// buryWithin is the owner's time to store a dead letter. After that the channel delivers the
	// letter again.
	buryWithin = 30 * time.Second
)

// Dead is a message with Expiry.MaxAttempts failed deliveries, for the owner to store elsewhere.
// The owner calls Topic.Bury with each. Until then the channel holds the message as a deferred
// message, so a crash loses nothing.
type Dead struct {
	Message  *Message // the owner may read the message until Bury
	Attempts uint16   // deliveries

	channel *Channel
	it      *item
	number  uint64
}

// Channel returns the name of the channel that gave the message up.
func (d Dead) Channel() string { return d.channel.cursor.name }

// discardExpired ends ready messages at the front that expired or failed too often. A requeued
// message behind a younger message expires once it reaches the front.
func (c *Channel) discardExpired(now mono.Time, fx *Effects) {
	for c.items.ready.Len() > 0 {
		m, attempts := c.items.ready.front()
		switch {
		case c.expiry.ended(m.Arrival, now):
			c.counters.Expired++
			c.done(c.items.pop(), fx)
		case c.expiry.MaxAttempts > 0 && int(attempts) >= c.expiry.MaxAttempts:
			c.giveUp(now, c.items.pop(), fx)
		default:
			return
		}
		if c.cursor.behind {
			c.catchUp(now)
		}
	}
}

// giveUp ends a message that failed too often, or hands it to the owner.
func (c *Channel) giveUp(now mono.Time, it *item, fx *Effects) {
	if !c.expiry.DeadLetters {
		c.counters.GivenUp++
		c.done(it, fx)
		return
	}
	c.cursor.log.changes++
	if c.burying >= maxBurying {
		it.due = now.Add(buryPause)
		c.items.due.push(it)
		return
	}
	c.burying++
	c.items.deliveries++
	it.delivery, it.due = c.items.deliveries, now.Add(buryWithin)
	c.items.due.push(it)
	it.msg.ref()
	fx.Dead = append(fx.Dead, Dead{Message: it.msg, Attempts: it.attempts, channel: c, it: it, number: it.delivery})
}

// unbury cancels the owner's storing of a dead letter: a later Bury does not count.
func (c *Channel) unbury(it *item) {
	if it.delivery != 0 {
		c.burying--
		it.delivery = 0
	}
}

// Bury ends a message of Effects.Dead that the owner has stored elsewhere. If the owner could not
// store the message, the channel delivers it again after retry. The owner must not use the
// message afterwards.
func (t *Topic) Bury(now mono.Time, d Dead, stored bool, retry time.Duration, fx *Effects) {
	c, it := d.channel, d.it
	if d.number != 0 && it.delivery == d.number && it.holder == nil {
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
	t.settle(now, fx, c)
}

// SetExpiry sets the topic's expiry, also for messages that already wait.
func (t *Topic) SetExpiry(now mono.Time, e Expiry, fx *Effects) {
	t.expiry = e
	for _, c := range t.cursors.channels {
		c.expiry = c.own.within(e)
		t.serve(now, c, fx)
	}
	t.advance(now, fx)
}

// SetChannelExpiry sets the channel's expiry. The topic's expiry replaces each zero field of e.
func (t *Topic) SetChannelExpiry(now mono.Time, c *Channel, e Expiry, fx *Effects) {
	c.own, c.expiry = e, e.within(t.expiry)
	t.settle(now, fx, c)
}

// Expiry returns the topic's expiry.
func (t *Topic) Expiry() Expiry { return t.expiry }

// Expiry returns the channel's own settings, without the topic's.
func (c *Channel) Expiry() Expiry { return c.own }
