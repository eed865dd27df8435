package broker

import (
	"slices"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// Outgoing is what a subscriber is about to be written: frames, and what is
// recorded of them once they are on its socket. It refers to no message: Take
// encodes them under the topic's lock, so that a message can be given back the
// moment it is finished. The alternative, messages that are counted while they
// are written, pins them for as long as a slow subscriber takes.
// The zero value is empty.
type Outgoing struct {
	// Frames are the messages, encoded. They belong to the Outgoing's owner.
	Frames []byte

	sent []sent
}

// sent is a delivery, without the message.
type sent struct {
	due      mono.Time     // from when on it is late
	access   time.Duration // its access delay
	consumer time.Duration // of what came after due, for how long it waited for consumers
	first    bool          // of several deliveries of the message
}

// Messages is how many are in Frames.
func (o *Outgoing) Messages() int { return len(o.sent) }

// Reset empties o and keeps its memory.
func (o *Outgoing) Reset() { o.Frames, o.sent = o.Frames[:0], o.sent[:0] }

// Relay adds a message of another broker, which records how late the message is.
func (o *Outgoing) Relay(m wire.Message) {
	o.Frames = slices.Grow(o.Frames, wire.MessageFrameSize(len(m.Body)))
	o.Frames = wire.AppendMessage(o.Frames, m.Timestamp, m.Attempts, m.ID, m.Body)
	o.sent = append(o.sent, sent{})
}

func (o *Outgoing) add(d *queue.Delivery) {
	m := d.Message
	o.Frames = slices.Grow(o.Frames, wire.MessageFrameSize(len(m.Body))) // once, not for each field
	o.Frames = wire.AppendMessage(o.Frames, int64(m.Timestamp), d.Attempts, m.ID, m.Body)
	// That the broker was late besides is no excuse; that consumers were is its own delay.
	due := m.Arrival.Add(max(m.Access, m.Defer))
	held := max(0, m.Held-max(0, m.Defer-m.Access))
	o.sent = append(o.sent, sent{due: due, access: m.Access, consumer: held + d.Waited, first: d.Attempts == 1})
}
