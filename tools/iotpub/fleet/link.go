package fleet

import (
	"github.com/srtm-io/srtm/internal/container"
	"github.com/srtm-io/srtm/internal/mono"
)

type linkState uint8

const (
	dialling    linkState = iota
	identifying           // IDENTIFY or CONNECT was sent, the reply is pending
	ready
	dead // closed; the slot is not free yet
)

// link is a connection of a publisher.
type link struct {
	publisher *publisher
	slot      int32
	address   string
	state     linkState
	dialStart mono.Time // start of dialling
	// maximum bounds the open commands, if the broker has a bound; 0: none.
	maximum int
	// received holds the start of an incomplete frame.
	received []byte
	// unsent holds bytes that the socket did not accept. New messages are added only below
	// maxOut.
	unsent []byte
	// open holds the unanswered commands, oldest first.
	open container.Queue[command]
}

// command is an unanswered PUB, MPUB or PUBLISH.
type command struct {
	seq uint32 // number of the first message
	batch
}

// batch is messages of a publisher that are due together.
type batch struct {
	intended mono.Time
	count    int32
	size     int32
}

// publisher is one emulated sensor.
type publisher struct {
	source int32
	hello  []byte // the magic and IDENTIFY, or CONNECT
	name   string // MQTT topic name
	seq    uint32 // number of the next message

	// target is the assigned broker, empty while unknown or displaced. epoch is the epoch
	// of the assignment.
	target    string
	epoch     uint64
	displaced bool // assigned to no broker

	// link is the link for sending, or nil. next is a link to target while link leads to
	// another broker or is nil. A ready next waits for the last reply on link. Until then
	// the publisher sends nothing.
	link, next *link

	// waiting holds the batches that are due but not sent, at most Config.MaxWaiting
	// messages. Invariant: waitingMessages is the number of messages in waiting; parked is
	// true if waiting is not empty.
	waiting         container.Queue[batch]
	waitingMessages int
	parked          bool // counted in worker.waiting

	failures uint // failed dials in a row
	queued   bool // in worker.redial
}

// canSend reports whether a batch may be written now.
func (p *publisher) canSend(maxOutstanding int) bool {
	if p.link != nil && p.link.maximum > 0 {
		maxOutstanding = min(maxOutstanding, p.link.maximum)
	}
	return p.link != nil && p.link.state == ready && !p.switching() && !p.displaced &&
		len(p.link.unsent) < maxOut && p.link.open.Len() < maxOutstanding
}

// switching reports whether the next link is ready and waits for the old link's last reply.
func (p *publisher) switching() bool { return p.next != nil && p.next.state == ready }
