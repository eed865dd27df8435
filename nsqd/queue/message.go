package queue

import (
	"errors"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Message is one accepted message. It is shared by all channels of its topic
// and does not change once it is released. It belongs to the machine from Put
// until it is listed in Effects.Free; then its owner may use it for another.
//
// A flood's backlog is made of these, so their size matters: with 112 bytes a message and
// its body fit into one size class of the allocator (see nsqd/broker's pool).
type Message struct {
	// Set once, by the publisher's side; refs apart.
	ID   wire.MessageID
	Body []byte // owned by the message
	// Only names the one channel that it is for, if it was carried forward in the log
	// or imported; nil: all. Attempts are then the deliveries so far.
	Only     *string
	Attempts uint16
	Source   stamp.Source // of Arrival
	spilled  bool         // in the tail, and counted as on its way to disk
	// refs is how many need the message: the backlog or the channels that it is
	// in, the tail, and the writer that took it by TakeUnwritten. The machine counts.
	refs      int32
	Arrival   mono.Time
	Timestamp mono.Wall
	Defer     time.Duration // a channel holds it back until Arrival + Defer; 0 = not deferred

	// Offset is its place in the topic's log. The machine sets it, but for Refill.
	Offset Offset

	// Access is the access delay: how long the message had to wait for its token,
	// counted from when the backlog was no longer held up otherwise, and without the
	// time for which it had one that was not used. Set once, at release.
	Access time.Duration

	// Held is for how long before that no channel took it: see the package comment.
	// Released is when it left the topic; of a message that comes back from disk,
	// when it had its token. Set once, at release.
	Held     time.Duration
	Released mono.Time
}

// isFor reports whether the message is for a channel.
func (m *Message) isFor(channel string) bool { return m.Only == nil || *m.Only == channel }

func (m *Message) ref() { m.refs++ }

// Overhead is what a message takes in memory beside its body, in bytes: about
// what it does, with its place in one channel.
const Overhead = 256

// Size is what the message takes in memory, in bytes.
func (m *Message) Size() int { return len(m.Body) + Overhead }

// Refusals. They are values of the protocol's everyday life, not accidents.
var (
	// ErrFull: the topic already holds as many messages as it may.
	ErrFull = errors.New("queue is full")
	// ErrNotInFlight: the consumer does not hold that message (any more).
	ErrNotInFlight = errors.New("message is not in flight to this consumer")
	// ErrUnknownConsumer: the consumer was removed, or never added.
	ErrUnknownConsumer = errors.New("no such consumer")
	// ErrNoCursor: the channel has no place in a log, since it or its topic is ephemeral
	// or there is no disk.
	ErrNoCursor = errors.New("an ephemeral channel or topic has no log to seek in")
	// ErrUnknownChannel: the topic has no channel of that name.
	ErrUnknownChannel = errors.New("no such channel")
)

// OverLimitError refuses a message that would wait for its token longer than
// the topic's policy allows.
type OverLimitError struct {
	Delay time.Duration // the access delay it would have had
	Limit time.Duration
}

func (e *OverLimitError) Error() string {
	return fmt.Sprintf("over the rate limit: access delay %v is more than %v", e.Delay, e.Limit)
}
