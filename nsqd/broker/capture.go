package broker

import (
	"cmp"
	"math"
	"slices"
	"strings"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/pacing/police"
)

// Bounds of a capture. Messages beyond the bounds count as lost.
const (
	// maxCaptured bounds the messages of a piece.
	maxCaptured = 1 << 16
	// maxCapturedPublishers bounds the publishers that a capture distinguishes.
	maxCapturedPublishers = 1 << 16
	// maxCapturedOf is the bound for one owner. So a host that invents client_ids leaves
	// room for other publishers.
	maxCapturedOf = maxCapturedPublishers / 8 * 7
)

// capture records a topic's arrivals, for replay by the control plane: the time and the
// publisher of every accepted message. Messages that a limit refused are not recorded,
// since they took no token.
//
// Messages are recorded in the order of acceptance, and leave in pieces sorted by arrival.
type capture struct {
	// Set once.
	id     uint64 // number of the capture within the topic
	toWall int64  // difference between mono.Wall and mono.Time

	// Guarded by runner.mu.
	piece   []captured
	numbers map[string]uint32       // publisher numbers by name
	owned   map[police.Identity]int // number of publishers by owner
	owners  []police.Identity       // by publisher number
	named   []string                // publishers that no piece has named yet
	vouched []string                // authentication of each in named
	through []string                // forwarding broker of each in named
	lost    uint64                  // messages lost since the last piece
	others  uint64                  // messages of publishers beyond the bounds; included in lost
	taken   bool                    // a piece was taken
	unknown Publisher               // publisher of messages without a publisher

	// spare is the memory of the previous piece, for reuse. Owned by the caller of
	// Arrivals.
	spare []captured
}

// captured is the record of a message.
type captured struct {
	at        mono.Time
	publisher uint32
}

// uncounted is the number of publishers beyond the bounds.
const uncounted = math.MaxUint32

// add records n messages that arrived together.
func (c *capture) add(from *Publisher, at mono.Time, n int) {
	if from == nil {
		from = &c.unknown
	}
	if from.named != c.id {
		from.named, from.number = c.id, c.number(from)
	}
	room := maxCaptured - len(c.piece)
	if from.number == uncounted {
		room = 0
		c.others += uint64(n)
	}
	if n > room {
		c.lost += uint64(n - room)
		n = room
	}
	for range n {
		c.piece = append(c.piece, captured{at, from.number})
	}
}

// number returns a publisher's number. Connections with the same name share a number. If
// the first owner of the name was authenticated, a different owner gets a separate name and
// number.
func (c *capture) number(p *Publisher) uint32 {
	name, owner := p.name(), p.owner()
	n, exists := c.numbers[name]
	if exists && owner != c.owners[n] && c.owners[n].Kind != "addr" {
		name = strings.ToValidUTF8(owner.Kind+":"+owner.ID+"/"+name, "?")
		n, exists = c.numbers[name]
	}
	if exists {
		return n
	}
	n = uint32(len(c.numbers))
	if n == maxCapturedPublishers || c.owned[owner] == maxCapturedOf {
		return uncounted
	}
	c.owned[owner]++
	c.numbers[name] = n
	c.owners = append(c.owners, owner)
	c.named = append(c.named, name)
	vouched := "" // declared only by the client
	if owner.Kind != "addr" {
		vouched = strings.ToValidUTF8(owner.Kind+":"+owner.ID, "?")
	}
	c.vouched, c.through = append(c.vouched, vouched), append(c.through, p.forwarder)
	return n
}

// recorder holds the capture of a topic's arrivals.
type recorder struct {
	runner *runner // set once

	// Guarded by mu.
	capture  *capture // nil without a capture
	captures uint64   // number of captures begun
}

// Capture starts a new record of arrivals, and drops the current record.
// Requires: mono and wall are the same moment.
func (r *recorder) Capture(mono mono.Time, wall mono.Wall) {
	c := &capture{toWall: int64(wall) - int64(mono), numbers: map[string]uint32{}, owned: map[police.Identity]int{}}
	r.runner.mu.Lock()
	defer r.runner.mu.Unlock()
	r.captures++
	c.id = r.captures
	r.capture = c
}

// EndCapture drops the record and stops recording.
func (r *recorder) EndCapture() {
	r.runner.mu.Lock()
	r.capture = nil
	r.runner.mu.Unlock()
}

// Arrivals returns the arrivals since the last call, or nil without a capture. Only one
// goroutine may call Arrivals.
func (r *recorder) Arrivals() *srtmv1.Arrivals {
	r.runner.mu.Lock()
	c := r.capture
	if c == nil {
		r.runner.mu.Unlock()
		return nil
	}
	piece := c.piece
	c.piece = c.spare[:0]
	a := &srtmv1.Arrivals{Topic: r.runner.name, Publishers: c.named, Owners: c.vouched, Forwarders: c.through, Lost: c.lost, Others: c.others, First: !c.taken}
	c.named, c.vouched, c.through, c.lost, c.others, c.taken = nil, nil, nil, 0, 0, true
	r.runner.mu.Unlock()

	c.spare = piece
	if len(piece) == 0 {
		return a
	}
	slices.SortFunc(piece, func(a, b captured) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.publisher, b.publisher))
	})
	a.StartNs = int64(piece[0].at) + c.toWall
	a.GapNs = make([]uint64, len(piece))
	a.Publisher = make([]uint32, len(piece))
	last := piece[0].at
	for i, m := range piece {
		a.GapNs[i] = uint64(m.at.Sub(last))
		a.Publisher[i] = m.publisher
		last = m.at
	}
	return a
}

// Capture starts Topic.Capture now. It returns false if the topic does not exist.
func (n *Node) Capture(topic string) bool {
	t, err := n.broker().Topic([]byte(topic))
	if err != nil {
		return false
	}
	t.intake.recorder.Capture(n.broker().shared.now(), clock.Wall())
	return true
}

// EndCapture calls Topic.EndCapture, if the topic exists.
func (n *Node) EndCapture(topic string) {
	if t, err := n.broker().Topic([]byte(topic)); err == nil {
		t.intake.recorder.EndCapture()
	}
}

// Arrivals calls Topic.Arrivals. It returns nil if the topic does not exist.
func (n *Node) Arrivals(topic string) *srtmv1.Arrivals {
	t, err := n.broker().Topic([]byte(topic))
	if err != nil {
		return nil
	}
	return t.intake.recorder.Arrivals()
}
