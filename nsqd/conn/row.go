package conn

import (
	"errors"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/broker"
)

// row is publishes to one topic that came together: they are handed over
// together, since the topic's lock, and what a step costs apart from the
// message, is a third of what a pipelined publish takes. A connection has one
// only while it consumes, or waits for its errand.
type row struct {
	topic *broker.Topic
	as    *broker.Publisher
	count *pubCount
	kinds []session.OpKind
	pubs  []broker.Published // their bodies are in the connection's buffer
	errs  []error
	next  int // the first that is not answered
}

// rowSize is how many publishes, or FINs, a row has at most.
const rowSize = 64

// joins puts a publish into the row, if it can be and more follows it or came
// before; else it is to be published alone.
func (c *client) joins(t *task, now mono.Time) (joined bool, err error) {
	op := &t.op
	if op.Kind != session.OpPub && op.Kind != session.OpDpub || c.srv.cfg.Auth != nil || len(c.unsettled) > 0 {
		return false, nil
	}
	if c.row == nil && c.r+t.n == c.w {
		return false, nil
	}
	to := c.target(op.Topic)
	if to == nil || to.topic.Durable() {
		return false, nil
	}
	if c.row != nil && (c.row.topic != to.topic || len(c.row.pubs) == rowSize) {
		if err := c.flushRow(now); err != nil {
			return false, err
		}
		if to = c.target(op.Topic); to == nil { // deleted meanwhile
			return false, nil
		}
	}
	if c.row == nil {
		c.row = c.srv.rows.Get().(*row)
		c.row.topic, c.row.as, c.row.count = to.topic, to.as, to.count
	}
	c.row.kinds = append(c.row.kinds, op.Kind)
	c.row.pubs = append(c.row.pubs, broker.Published{Body: op.Body, Arrival: c.arrival(t), Defer: op.Defer, From: c.row.as})
	c.r += t.n
	return true, nil
}

// flushRow publishes the row and answers it. errWaits: the rest of it has to
// wait, and stays.
func (c *client) flushRow(now mono.Time) error {
	r := c.row
	if r == nil {
		return nil
	}
	var op session.Op // what Answer needs of them
	for r.next < len(r.pubs) {
		r.errs = r.topic.PublishEach(now, c.wall, r.pubs[r.next:], r.errs[:0])
		for _, err := range r.errs {
			kind, name := r.kinds[r.next], r.topic.Name()
			switch {
			case err == nil:
				add(&r.count.count, 1)
			case errors.Is(err, broker.ErrBusy), errors.Is(err, broker.ErrGone):
				// Alone it can wait, or go to the topic's next life.
				p := r.pubs[r.next]
				p.NoWait = c.hurries()
				if _, err = c.hand([]byte(name), p, nil, now); errors.Is(err, broker.ErrBusy) {
					return errWaits
				}
			default:
				err = refusal([]byte(name), err)
			}
			op.Kind = kind
			c.sess.Answer(&op, err)
			r.next++
		}
	}
	clear(r.pubs)
	*r = row{kinds: r.kinds[:0], pubs: r.pubs[:0], errs: r.errs[:0]}
	c.row = nil
	c.srv.rows.Put(r)
	return nil
}

// finRow is FINs that came together, handed over together for the same reason as
// a row. A connection has one only while it consumes, and never beside a row.
type finRow struct {
	ids  []wire.MessageID
	errs []error
}

// finish puts a FIN into the row. It takes effect by flushFins.
func (c *client) finish(id wire.MessageID, now mono.Time) {
	if c.fins == nil {
		c.fins = c.srv.fins.Get().(*finRow)
	}
	c.fins.ids = append(c.fins.ids, id)
	if len(c.fins.ids) == rowSize {
		c.flushFins(now)
	}
}

// flushFins finishes the row's messages and answers those that were refused.
func (c *client) flushFins(now mono.Time) {
	r := c.fins
	if r == nil {
		return
	}
	n := 0
	r.errs = c.sub.FinishBatch(now, r.ids, r.errs)
	op := session.Op{Kind: session.OpFin}
	for i, err := range r.errs {
		if err == nil {
			n++
		}
		op.ID = r.ids[i]
		c.sess.Answer(&op, err)
	}
	add(&c.ledger.finished, n)
	clear(r.errs)
	*r = finRow{ids: r.ids[:0], errs: r.errs[:0]}
	c.fins = nil
	c.srv.fins.Put(r)
}

// hand gives a message, or with bodies a batch, to the topic of that name, which
// it returns. ErrBusy only if p says NoWait.
func (c *client) hand(name []byte, p broker.Published, bodies *wire.Batch, now mono.Time) (*broker.Topic, error) {
	for {
		to, err := c.publishTo(name)
		if err != nil {
			return nil, err
		}
		t, n := to.topic, 1
		p.From = to.as
		if t.Durable() && p.NoWait {
			return t, broker.ErrBusy
		}
		if bodies != nil {
			n = bodies.Len()
			err = t.PublishBatch(now, c.wall, p, bodies)
		} else {
			err = t.Publish(now, c.wall, p)
		}
		switch {
		case err == nil:
			add(&to.count.count, n)
			return t, nil
		case errors.Is(err, broker.ErrBusy):
			return t, err
		case !errors.Is(err, broker.ErrGone):
			return t, refusal(name, err)
		}
		c.leaveTopic(t) // deleted since it was looked up
	}
}
