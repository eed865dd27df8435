package broker

import "github.com/srtm-io/srtm/nsqd/queue"

// outbox is a FIFO of the deliveries that a subscriber has not taken yet. How
// many there can be is nsqd/queue's to bound: at most twice the maximum RDY.
// The zero value is empty.
//
// Invariant: buf[:head] and buf[len(buf):cap(buf)] refer to no message.
type outbox struct {
	buf  []queue.Delivery
	head int
}

// outboxKept is how many slots an empty outbox keeps, 192 KiB: those of the
// maximum RDY by default, and to spare. With less, a subscriber that is served as
// fast as it goes would take them anew each time it is.
const outboxKept = 4096

func (o *outbox) len() int { return len(o.buf) - o.head }

func (o *outbox) push(d queue.Delivery) {
	if len(o.buf) == cap(o.buf) && o.head > len(o.buf)/2 {
		o.keep(nil)
	}
	o.buf = append(o.buf, d)
}

// pop takes the oldest. Requires: len() > 0.
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

// keep drops what is not current, and moves the rest to the front; nil keeps all.
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
