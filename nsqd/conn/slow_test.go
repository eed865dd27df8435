package conn

import (
	"testing"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestSlowTurnsAreCountedByTheirCause(t *testing.T) {
	var s Server
	const at = mono.Time(1e9)
	s.slow.note(CauseCommands, at, at.Add(slowTurn))
	s.slow.note(CauseCommands, at, at.Add(slowTurn+1))
	s.slow.note(CauseTimers, at, at.Add(2*slowTurn))
	got := s.Stats().SlowTurns
	testkit.Equal(t, got, [causes]uint64{CauseCommands: 1, CauseTimers: 1})
	seen := map[string]bool{}
	for c := range got {
		seen[Cause(c).String()] = true
	}
	if len(seen) != int(causes) || seen[""] {
		t.Errorf("causes are called %v", seen)
	}
}
