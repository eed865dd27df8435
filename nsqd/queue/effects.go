package queue

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Effects are what a step wants done. The caller owns it, passes it to a
// step, acts on it, and calls Reset; it then costs no allocation.
type Effects struct {
	// Deliveries to write to consumers, in order.
	Deliveries []Delivery
	// Released holds when each message released had arrived and was eligible.
	Released []Release
	// Finished holds the messages that consumers finished.
	Finished []*Message
	// Dead holds messages that failed too often, for the owner to store elsewhere.
	Dead []Dead
	// Disk says that there is something for TakeUnwritten, or Want.
	Disk bool
	// Free are messages that are not needed any longer.
	Free []*Message
	// Held is by how many bytes the step changed what messages take in memory:
	// their bodies, and Overhead for each.
	Held int
}

// Release is when a message arrived, when it had its token, and when it left.
type Release struct {
	Arrival, Eligible, Released mono.Time
	Access                      time.Duration // see Message
}

// Reset empties e and keeps its memory. References to messages are dropped.
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

// Unref says that the owner needs messages no longer that it got by Topic.TakeUnwritten.
func (e *Effects) Unref(msgs []*Message) {
	for _, m := range msgs {
		e.unref(m)
	}
}

// unref says that a holder of the message needs it no longer.
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
