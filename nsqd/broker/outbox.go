package broker

import "github.com/srtm-io/srtm/nsqd/queue"

// outbox is a FIFO of deliveries that a subscriber has not taken yet. nsqd/queue bounds the
// number of deliveries to twice the maximum RDY. The zero value is empty.
//
// Invariant: buf[:head] and buf[len(buf):cap(buf)] refer to no message.
type outbox struct {
	buf  []queue.Delivery
	head int
}

// outboxKept is the number of slots that an empty outbox keeps (192 KiB). It exceeds the
// default maximum RDY. With fewer slots, a fast subscriber would reallocate the buffer on
// every refill.
const outboxKept = 4096

func (o *outbox) len() int { return len(o.buf) - o.head }

func (o *outbox) push(d queue.Delivery) {
	if len(o.buf) == cap(o.buf) && o.head > len(o.buf)/2 {
		o.keep(nil)
	}
	o.buf = append(o.buf, d)
}

// pop removes the oldest delivery. Requires: len() > 0.
func (o *outbox) pop() queue.Delivery {
	d := o.buf[o.head]
	o.buf[o.head] = queue.Delivery{}
	o.head++
	if o.len() == 0 {
		o.buf, o.head = o.buf[:0], 0
		if cap(o.buf) > outboxKept {
			o.buf = nil
		}
	}
	return d
}

// keep drops deliveries that are not current, and moves the rest to the front. nil keeps
// all.
func (o *outbox) keep(current func(queue.Delivery) bool) {
	n := 0
	for _, d := range o.buf[o.head:] {
		if current == nil || current(d) {
			o.buf[n] = d
			n++
		}
	}
	clear(o.buf[n:])
	o.buf, o.head = o.buf[:n], 0
}
