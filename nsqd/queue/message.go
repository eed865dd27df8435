package queue

import (
	"errors"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Message is one accepted message. All channels of the topic share the message, and it does not
// change after its release. The message belongs to the machine from Put until Effects.Free lists
// it. Then the owner may reuse it.
//
// A backlog has many messages, so their size matters. With 112 bytes a message and its body fit
// into one size class of the allocator (see nsqd/broker's pool).
type Message struct {
	// Set once, by the publisher's side, except refs.
	ID   wire.MessageID
	Body []byte // owned by the message; set by SetContent
	// Only names the single channel of a message that was carried forward in the log or imported.
	// Then Attempts counts the deliveries so far. nil: the message is for all channels.
	Only      *string
	Attempts  uint16
	Source    stamp.Source // of Arrival
	attribute uint8        // length of the attribute
	// refs counts the holders of the message: the backlog or the channels, the tail, and the
	// writer that took the message by Disk.TakeUnwritten. The machine maintains refs.
	refs      refs
	Arrival   mono.Time
	Timestamp mono.Wall
	Defer     time.Duration // a channel holds the message back until Arrival + Defer; 0 = not deferred

	// Offset is the message's place in the topic's log. The machine sets it, except in Refill.
	Offset Offset

	// Access is the access delay: how long the message waited for its token. The delay starts
	// when nothing but tokens holds up the backlog. It excludes the time for which the message
	// had a token and was not released. Set once, at release.
	Access time.Duration

	// Held is how long no channel took the message, before Access started: see the package
	// comment. Released is when the message left the topic, or, for a message read back from
	// disk, when the message got its token. Set once, at release.
	Held     time.Duration
	Released mono.Time
}

// isFor reports whether the message is for a channel.
func (m *Message) isFor(channel string) bool { return m.Only == nil || *m.Only == channel }

// SetContent copies a body and an attribute into the memory of Body. The attribute has at most
// wire.MaxAttribute bytes. It lies behind the body, since a field would take 24 bytes.
func (m *Message) SetContent(body, attribute []byte) {
	m.Body = append(append(m.Body[:0], body...), attribute...)[:len(body)]
	m.attribute = uint8(len(attribute))
}

// Attribute returns the attribute, which is empty for most messages.
func (m *Message) Attribute() []byte {
	end := len(m.Body) + int(m.attribute)
	return m.Body[len(m.Body):end:end]
}

func (m *Message) ref() { m.refs += oneRef }

// refs is a number of holders, times oneRef, and the flag spilled.
type refs int32

const (
	spilled refs = 1 // in the tail, and counted as on its way to disk
	oneRef  refs = 2
)

func (r refs) holders() int { return int(r / oneRef) }

func (m *Message) spilled() bool { return m.refs&spilled != 0 }

// Overhead is the approximate memory of a message beside its content, in bytes, with the
// message's place in one channel.
const Overhead = 256

// Size returns the message's memory in bytes.
func (m *Message) Size() int { return len(m.Body) + int(m.attribute) + Overhead }

// Expected refusals, part of normal operation.
var (
	// ErrFull: the topic has no room.
	ErrFull = errors.New("queue is full")
	// ErrNotInFlight: the consumer does not hold the message, or no longer.
	ErrNotInFlight = errors.New("message is not in flight to this consumer")
	// ErrUnknownConsumer: the consumer was removed or never added.
	ErrUnknownConsumer = errors.New("no such consumer")
	// ErrNoCursor: the channel has no place in a log, because the channel or its topic is
	// ephemeral or there is no disk.
	ErrNoCursor = errors.New("an ephemeral channel or topic has no log to seek in")
	// ErrUnknownChannel: the topic has no channel with the given name.
	ErrUnknownChannel = errors.New("no such channel")
)

// OverLimitError refuses a message that would wait for its token longer than the topic's policy
// allows.
type OverLimitError struct {
	Delay time.Duration // the access delay of the refused message
	Limit time.Duration
}

func (e *OverLimitError) Error() string {
	return fmt.Sprintf("over the rate limit: access delay %v is more than %v", e.Delay, e.Limit)
}

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
	// Held is the change in the messages' memory, in bytes: contents and Overhead.
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
	m.refs -= oneRef
	switch {
	case m.refs == 0:
		e.Free = append(e.Free, m)
		e.Held -= m.Size()
	case m.refs < 0:
		panic("queue: message " + string(m.ID[:]) + " is given back too often")
	}
}
