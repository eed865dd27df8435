package conn

import (
	"slices"
	"testing"
)

// The next turn's flushes read from the last subscribers of this turn, and from no closed connection.
func TestATurnFollowsTheLastSubscribersOfTheTurnBefore(t *testing.T) {
	l := &loop{readBytes: 1}
	for range maxFollowed + 3 {
		l.delivered = append(l.delivered, &slot{phase: open})
	}
	last := slices.Clone(l.delivered[3:])
	last[0].phase, last[1].phase, last[1].offloaded = gone, gone, true // the second still belongs to an offloaded operation
	l.resetTurn()
	if !slices.Equal(l.delivered, last[1:]) || l.readBytes != 0 {
		t.Errorf("%d subscribers, want the last %d; %d bytes read", len(l.delivered), len(last)-1, l.readBytes)
	}
	if l.forgetDelivered(); len(l.delivered) != 0 {
		t.Error("another loop's connections are still listed")
	}
}
