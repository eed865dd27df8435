package conn

import (
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// slowTurn is how long a part of a loop's turn may take: every connection on the loop
// waits for its end. It is the bound of a design, not of a machine: a turn during
// which the system ran something else is counted, too.
const slowTurn = 5 * time.Millisecond

// Cause is the part of a loop's turn that took long.
type Cause uint8

// The causes.
const (
	CauseCommands Cause = iota // reading from connections, and carrying out what they say
	CauseOutput                // taking connections in, and writing replies and messages
	CauseTimers                // heartbeats and ends
	causes
)

func (c Cause) String() string { return [causes]string{"commands", "output", "timers"}[c] }

// slowTurns counts the parts of turns that took longer than slowTurn. Loops add.
type slowTurns [causes]atomic.Uint64

func (s *slowTurns) note(c Cause, from, to mono.Time) {
	if to.Sub(from) > slowTurn {
		s[c].Add(1)
	}
}
