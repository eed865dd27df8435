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

// Bounds of a capture. What is beyond is counted as lost.
const (
	// maxCaptured is how many messages a piece has at most.
	maxCaptured = 1 << 16
	// maxCapturedPublishers is how many publishers a capture tells apart.
	maxCapturedPublishers = 1 << 16
	// maxCapturedOf is how many of them one owner may have, so that client_ids which
	// one host thinks up leave room for the others.
	maxCapturedOf = maxCapturedPublishers / 8 * 7
)

// capture is the record of a topic's arrivals: every message that is accepted,
// when it arrived and from whom, for the control plane to replay. What a limit
// refused is not in it: it took no token.
//
// Messages come in the order in which they are accepted, which is not that of
// their arrival, and leave in pieces that are in order of arrival.
type capture struct {
	// Set once.
	id     uint64 // of the captures of this topic
	toWall int64  // a mono.Time and this is a mono.Wall

	// Guarded by runner.mu.
	piece   []captured
	numbers map[string]uint32       // of publishers, by name
	owned   map[police.Identity]int // how many of them, by owner
	owners  []police.Identity       // by number
	named   []string                // those that no piece has named
	vouched []string                // for each of named: by whom
	through []string                // for each of named: the broker that forwards for it
	lost    uint64                  // since the last piece
	others  uint64                  // of those: of publishers that are not told apart
	taken   bool                    // a piece was
	unknown Publisher               // of messages without one

	// spare is the memory of the piece before, for the next; owned by the one
	// who takes them.
	spare []captured
}

// captured is a message.
type captured struct {
	at        mono.Time
	publisher uint32
}

// uncounted is the number of publishers beyond maxCapturedPublishers.
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

// number returns a publisher's number; connections of one name are one, unless one is of
// another owner than the first, who was authenticated: it has a name of its own.
func (c *capture) number(p *Publisher) uint32 {
	name, owner := p.name(), p.owner()
	n, known := c.numbers[name]
	if known && owner != c.owners[n] && c.owners[n].Kind != "addr" {
		name = strings.ToValidUTF8(owner.Kind+":"+owner.ID+"/"+name, "?")
		n, known = c.numbers[name]
	}
	if known {
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
	vouched := "" // declared by the client alone
	if owner.Kind != "addr" {
		vouched = strings.ToValidUTF8(owner.Kind+":"+owner.ID, "?")
	}
	c.vouched, c.through = append(c.vouched, vouched), append(c.through, p.forwarder)
	return n
}

// recorder has the capture of a topic's arrivals.
type recorder struct {
	*runner // set once

	// Guarded by mu.
	capture  *capture // nil: none is wanted
	captures uint64   // ever begun
}

// Capture begins to record arrivals, anew if they are recorded already.
// Requires: mono and wall are the same moment.
func (r *recorder) Capture(mono mono.Time, wall mono.Wall) {
	c := &capture{toWall: int64(wall) - int64(mono), numbers: map[string]uint32{}, owned: map[police.Identity]int{}}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.captures++
	c.id = r.captures
	r.capture = c
}

// EndCapture drops what is recorded, and records no more.
func (r *recorder) EndCapture() {
	r.mu.Lock()
	r.capture = nil
	r.mu.Unlock()
}

// Arrivals returns what was recorded since the last call; nil if nothing is being
// recorded. There is one caller at a time.
func (r *recorder) Arrivals() *srtmv1.Arrivals {
	r.mu.Lock()
	c := r.capture
	if c == nil {
		r.mu.Unlock()
		return nil
	}
	piece := c.piece
	c.piece = c.spare[:0]
	a := &srtmv1.Arrivals{Topic: r.name, Publishers: c.named, Owners: c.vouched, Forwarders: c.through, Lost: c.lost, Others: c.others, First: !c.taken}
	c.named, c.vouched, c.through, c.lost, c.others, c.taken = nil, nil, nil, 0, 0, true
	r.mu.Unlock()

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

// Capture is Topic.Capture, from now on; false without such a topic.
func (n *Node) Capture(topic string) bool {
	t, err := n.broker().Topic([]byte(topic))
	if err != nil {
		return false
	}
	t.Capture(n.broker().now(), clock.Wall())
	return true
}

// EndCapture is Topic.EndCapture, if there is such a topic.
func (n *Node) EndCapture(topic string) {
	if t, err := n.broker().Topic([]byte(topic)); err == nil {
		t.EndCapture()
	}
}

// Arrivals is Topic.Arrivals; nil without such a topic.
func (n *Node) Arrivals(topic string) *srtmv1.Arrivals {
	t, err := n.broker().Topic([]byte(topic))
	if err != nil {
		return nil
	}
	return t.Arrivals()
}
