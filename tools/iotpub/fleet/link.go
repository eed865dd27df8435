package fleet

import (
	"github.com/srtm-io/srtm/internal/fifo"
	"github.com/srtm-io/srtm/internal/mono"
)

type linkState uint8

const (
	dialling    linkState = iota
	identifying           // IDENTIFY is sent, its answer is awaited
	ready
	dead // closed; the slot waits to be free
)

// link is one connection of a publisher.
type link struct {
	publisher *publisher
	slot      int32
	address   string
	state     linkState
	since     mono.Time // when dialling began
	// in holds the start of a frame whose end has not come.
	in []byte
	// out holds what the socket did not take, at most maxOut before more is
	// added.
	out []byte
	// open are the commands that await their answers, oldest first.
	open fifo.Queue[command]
}

// command is a PUB or an MPUB that awaits its answer.
type command struct {
	seq      uint32 // of its first message
	count    int32
	intended mono.Time
}

// batch is an event that could not be sent when it was due.
type batch struct {
	intended mono.Time
	count    int32
	size     int32
}

// publisher is one emulated sensor.
type publisher struct {
	source int32
	hello  []byte // the magic and IDENTIFY
	seq    uint32 // of its next message

	// target is where it should be connected, "" while unknown or while it has no
	// place; epoch is that of the assignment that said so.
	target    string
	epoch     uint64
	displaced bool // it has no place

	// link is what it sends on, or nil. next is a link to the target while
	// link leads elsewhere or does not exist yet. A next that is ready waits
	// for link's last answer; until then nothing is sent.
	link, next *link

	// waiting are due and not sent, at most Config.MaxWaiting messages.
	// Invariant: waitingMessages is their sum, and parked follows from any.
	waiting         fifo.Queue[batch]
	waitingMessages int
	parked          bool // counted in worker.waiting

	failures uint // dials in a row that came to nothing
	queued   bool // in worker.redial
}

// canSend reports whether an event may be written now.
func (p *publisher) canSend(maxOutstanding int) bool {
	return p.link != nil && p.link.state == ready && !p.switching() && !p.displaced &&
		len(p.link.out) < maxOut && p.link.open.Len() < maxOutstanding
}

// switching: the next link is ready, and takes over after the old one's last
// answer.
func (p *publisher) switching() bool { return p.next != nil && p.next.state == ready }
