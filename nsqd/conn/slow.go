package conn

import (
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// slowTurn is the maximum duration of a part of a loop's turn. All connections of the loop wait
// during a turn. The design sets this limit, not the machine: a turn that the system interrupted
// counts, too.
const slowTurn = 5 * time.Millisecond

// Cause is the part of a loop's turn that was slow.
type Cause uint8

// Causes of slow turns.
const (
	CauseCommands Cause = iota // reading from connections and carrying out commands
	CauseOutput                // opening connections, and writing replies and messages
	CauseTimers                // heartbeats and timeouts
	causes
)

func (c Cause) String() string { return [causes]string{"commands", "output", "timers"}[c] }

// slowTurns counts the parts of turns that took longer than slowTurn.
type slowTurns [causes]atomic.Uint64

func (s *slowTurns) note(c Cause, from, to mono.Time) {
	if to.Sub(from) > slowTurn {
		s[c].Add(1)
	}
}
