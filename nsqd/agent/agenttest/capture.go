package agenttest

import (
	"cmp"
	"slices"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/mono"
)

// Arrival is the arrival of a message. Owner answers for the publisher, and is used when the publisher
// is new to the capture.
type Arrival struct {
	At        mono.Wall
	Publisher string
	Owner     string
}

// capture is the record of a topic.
type capture struct {
	piece   []Arrival
	numbers map[string]uint32 // numbers of the publishers
	named   []string          // publishers that no piece has named yet
	owners  []string          // owner of each publisher in named
	lost    uint64
	taken   bool
}

// Arrive makes the node accept messages, in any order. lost further messages are lost. If the topic is
// being captured, Arrive records the arrivals and returns true.
func (n *Node) Arrive(name string, lost uint64, arrivals ...Arrival) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.mu.topics[name]
	if t == nil || t.capture == nil {
		return false
	}
	c := t.capture
	for _, a := range arrivals {
		if _, known := c.numbers[a.Publisher]; !known {
			c.numbers[a.Publisher] = uint32(len(c.numbers))
			c.named, c.owners = append(c.named, a.Publisher), append(c.owners, a.Owner)
		}
	}
	c.piece = append(c.piece, arrivals...)
	c.lost += lost
	return true
}

// Captured reports whether the topic is being captured.
func (n *Node) Captured(name string) bool { return n.Arrive(name, 0) }

// Captures returns how many captures of the topic have begun.
func (n *Node) Captures(name string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.topics[name].captures
}

// Capture implements agent.Node.
func (n *Node) Capture(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.mu.topics[name]
	if t != nil {
		t.capture = &capture{numbers: map[string]uint32{}}
		t.captures++
	}
	return t != nil
}

// EndCapture implements agent.Node.
func (n *Node) EndCapture(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t := n.mu.topics[name]; t != nil {
		t.capture = nil
	}
}

// Arrivals implements agent.Node.
func (n *Node) Arrivals(name string) *srtmv1.Arrivals {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.mu.topics[name]
	if t == nil || t.capture == nil {
		return nil
	}
	c := t.capture
	a := &srtmv1.Arrivals{Topic: name, Publishers: c.named, Owners: c.owners, Lost: c.lost, First: !c.taken}
	slices.SortStableFunc(c.piece, func(a, b Arrival) int { return cmp.Compare(a.At, b.At) })
	for i, m := range c.piece {
		if i == 0 {
			a.StartNs = int64(m.At)
		}
		a.GapNs = append(a.GapNs, uint64(m.At-c.piece[max(0, i-1)].At))
		a.Publisher = append(a.Publisher, c.numbers[m.Publisher])
	}
	c.piece, c.named, c.owners, c.lost, c.taken = nil, nil, nil, 0, true
	return a
}
