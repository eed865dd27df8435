package conn

import (
	"errors"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// pubBatch collects publishes to one topic that came in one read. Publishing them together saves a
// third of the cost of a pipelined publish: the topic's lock and the fixed cost of a step. A
// connection has a pubBatch only during consume, or while it waits for its offloaded operation.
type pubBatch struct {
	target
	receipts []receipt
	pubs     []broker.Published // bodies are in the connection's buffer
	errs     []error
	next     int        // first unanswered publish
	op       session.Op // scratch of flushBatch
}

// receipt is the part of a publish that its answer needs.
type receipt struct {
	kind   session.OpKind
	packet uint16
}

func (r receipt) set(op *session.Op) { op.Kind, op.Packet, op.Reply = r.kind, r.packet, nil }

// batchSize is the maximum number of publishes, or FINs, in a batch.
const batchSize = 64

// joinBatch adds a publish to the batch, if there is a batch or more commands follow in the buffer.
// Otherwise the caller must publish it alone. A message that is too large does not join, because only
// publish refuses it.
func (c *client) joinBatch(t *task, now mono.Time) (joined bool, v verdict) {
	op := &t.op
	if op.Kind != session.OpPub && op.Kind != session.OpDpub || c.env.cfg.Auth != nil || len(c.pubs.unsettled) > 0 || c.mqtt.Patient(op) || c.env.isTooLarge(op) {
		return false, carriedOut
	}
	if c.pubs.batch == nil && c.r+t.n == c.w {
		return false, carriedOut
	}
	target := c.pubs.target(op.Topic, publisherOf(op))
	if target == nil || target.topic.Durable() {
		return false, carriedOut
	}
	if c.pubs.batch != nil && (c.pubs.batch.publisher != target.publisher || len(c.pubs.batch.pubs) == batchSize) {
		if v := c.flushBatch(now); v != carriedOut {
			return false, v
		}
		if target = c.pubs.target(op.Topic, publisherOf(op)); target == nil { // the topic was deleted meanwhile
			return false, carriedOut
		}
	}
	if c.pubs.batch == nil {
		c.pubs.batch = c.env.batches.Get().(*pubBatch)
		c.pubs.batch.target = *target
	}
	c.pubs.batch.receipts = append(c.pubs.batch.receipts, receipt{op.Kind, op.Packet})
	p := c.pubs.message(op, c.arrival(t))
	p.From = c.pubs.batch.publisher
	c.pubs.batch.pubs = append(c.pubs.batch.pubs, p)
	c.r += t.n
	return true, carriedOut
}

// flushBatch publishes the batch and answers it. With mustWait, the rest of the batch stays and
// must wait.
func (c *client) flushBatch(now mono.Time) verdict {
	b := c.pubs.batch
	if b == nil {
		return carriedOut
	}
	op := &b.op
	for b.next < len(b.pubs) {
		b.errs = b.topic.PublishEach(now, c.wall, b.pubs[b.next:], b.errs[:0])
		for _, err := range b.errs {
			name := b.topic.Name()
			b.receipts[b.next].set(op)
			switch {
			case err == nil:
				add(&b.count.count, 1)
			case errors.Is(err, broker.ErrBusy), errors.Is(err, broker.ErrGone), errors.Is(err, broker.ErrRetired):
				// On its own, the publish can wait, or go to the recreated topic or another broker.
				p := b.pubs[b.next]
				p.NoWait = c.driver.nonblocking()
				t, err := c.publishNamed([]byte(name), []byte(b.as), p, nil, now)
				if errors.Is(err, broker.ErrBusy) {
					return mustWait
				}
				b.next++
				c.answerPublish(op, t, err)
				continue
			default:
				err = Refusal([]byte(name), err)
				c.turn++
			}
			if err == nil && c.pubs.weight > 0 {
				op.Reply = b.publisher.Advice()
			}
			c.mqtt.CountRefused(op, err)
			c.sess.Answer(op, err)
			b.next++
		}
	}
	clear(b.pubs)
	*b = pubBatch{receipts: b.receipts[:0], pubs: b.pubs[:0], errs: b.errs[:0]}
	c.pubs.batch = nil
	c.env.batches.Put(b)
	return carriedOut
}

// finBatch collects FINs that came together, as pubBatch collects publishes. A connection has a
// finBatch only during consume, and never together with a pubBatch.
type finBatch struct {
	ids  []wire.MessageID
	errs []error
	op   session.Op // scratch of flushFins
}

// finish adds a FIN to the batch. flushFins carries it out.
func (c *client) finish(id wire.MessageID, now mono.Time) {
	if c.fins == nil {
		c.fins = c.env.fins.Get().(*finBatch)
	}
	c.fins.ids = append(c.fins.ids, id)
	if len(c.fins.ids) == batchSize {
		c.flushFins(now)
	}
}

// flushFins finishes the batch's messages and answers the refused FINs.
func (c *client) flushFins(now mono.Time) {
	b := c.fins
	if b == nil {
		return
	}
	n := 0
	b.errs = c.sub.FinishBatch(now, b.ids, b.errs)
	b.op.Kind = session.OpFin
	for i, err := range b.errs {
		if err == nil {
			n++
		} else {
			c.turn++
		}
		b.op.ID = b.ids[i]
		c.sess.Answer(&b.op, err)
	}
	add(&c.stats.finished, n)
	clear(b.errs)
	*b = finBatch{ids: b.ids[:0], errs: b.errs[:0]}
	c.fins = nil
	c.env.fins.Put(b)
}
