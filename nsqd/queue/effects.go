package queue

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Effects collects the results of a step. The caller owns the Effects, passes it to a step, acts
// on the results, and calls Reset. Reuse avoids allocation.
type Effects struct {
	// Deliveries to write to consumers, in order.
	Deliveries []Delivery
	// Released holds the arrival, token and release times of each released message.
	Released []Release
	// Finished holds the messages that consumers finished.
	Finished []*Message
	// Dead holds messages with too many failed deliveries, for the owner to store elsewhere.
	Dead []Dead
	// Disk reports that TakeUnwritten or Want has something to do.
	Disk bool
	// Free holds messages that the machine no longer needs.
	Free []*Message
	// Held is the change in the messages' memory, in bytes: bodies and Overhead.
	Held int
}

// Release holds when a message arrived, got its token, and left the topic.
type Release struct {
	Arrival, Eligible, Released mono.Time
	Access                      time.Duration // see Message
}

// Reset empties e and keeps its memory, without references to messages.
func (e *Effects) Reset() {
	clear(e.Deliveries)
	e.Deliveries = e.Deliveries[:0]
	e.Released = e.Released[:0]
	clear(e.Finished)
	e.Finished = e.Finished[:0]
	clear(e.Dead)
	e.Dead = e.Dead[:0]
	clear(e.Free)
	e.Free = e.Free[:0]
	e.Held, e.Disk = 0, false
}

// Unref gives back messages that the owner got from Topic.TakeUnwritten.
func (e *Effects) Unref(msgs []*Message) {
	for _, m := range msgs {
		e.unref(m)
	}
}

// unref removes one holder of the message.
func (e *Effects) unref(m *Message) {
	m.refs--
	switch {
	case m.refs == 0:
		e.Free = append(e.Free, m)
		e.Held -= m.Size()
	case m.refs < 0:
		panic("queue: message " + string(m.ID[:]) + " is given back too often")
	}
}
