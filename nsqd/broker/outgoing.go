package broker

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// Outgoing holds frames to be written to a subscriber, and the values to record after the
// write. It refers to no message: Take encodes messages under the topic's lock, so a
// finished message can be reused immediately. The alternative, reference counts during the
// write, would pin messages for as long as a slow subscriber takes. The zero value is
// empty.
type Outgoing struct {
	// Frames are the encoded messages, owned by the owner of the Outgoing.
	Frames []byte

	sent []sent
}

// sent is a delivery without its message.
type sent struct {
	due      mono.Time     // time from which the delivery is late
	access   time.Duration // access delay
	consumer time.Duration // time after due spent waiting for consumers
	first    bool          // first delivery of the message
}

// Messages returns the number of messages in Frames.
func (o *Outgoing) Messages() int { return len(o.sent) }

// Reset empties o and keeps its memory.
func (o *Outgoing) Reset() { o.Frames, o.sent = o.Frames[:0], o.sent[:0] }

// Relay adds a message of another broker. The other broker records the latency.
func (o *Outgoing) Relay(m wire.Message) {
	o.Frames = slices.Grow(o.Frames, wire.MessageFrameSize(len(m.Body)))
	o.Frames = wire.AppendMessage(o.Frames, m.Timestamp, m.Attempts, m.ID, m.Body)
	o.sent = append(o.sent, sent{})
}

func (o *Outgoing) add(d *queue.Delivery) {
	m := d.Message
	o.Frames = slices.Grow(o.Frames, wire.MessageFrameSize(len(m.Body))) // one growth for all fields
	o.Frames = wire.AppendMessage(o.Frames, int64(m.Timestamp), d.Attempts, m.ID, m.Body)
	// due does not include delays of the broker, which count as latency. Waits for
	// consumers are recorded separately.
	due := m.Arrival.Add(max(m.Access, m.Defer))
	held := max(0, m.Held-max(0, m.Defer-m.Access))
	o.sent = append(o.sent, sent{due: due, access: m.Access, consumer: held + d.Waited, first: d.Attempts == 1})
}
