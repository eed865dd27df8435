package fleet

import (
	"maps"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
)

// maxCodes bounds Refused, whose keys come from the network.
const maxCodes = 64

// OtherCode stands for refusals beyond maxCodes different codes.
const OtherCode = "other"

// Stats is what a fleet counted. Messages are counted, not commands.
//
// Invariant, when the fleet has drained:
// Offered == Accepted + sum(Refused) + Unanswered + Skipped.
type Stats struct {
	// Offered: the schedule wanted them sent by now.
	Offered uint64
	// Sent: handed to a connection.
	Sent uint64
	// Accepted: answered with OK.
	Accepted uint64
	// Refused: answered with an error, by its code.
	Refused map[string]uint64
	// Unanswered: sent on a connection that ended before the answer. They may
	// have been accepted; they are not sent again, so that a duplicate is
	// never of our making.
	Unanswered uint64
	// Skipped: not sent, because their publisher had no connection for too
	// long, or its connection took no more.
	Skipped uint64

	// Held: put off because their publisher had no connection, or its connection
	// took no more; they count in Sent or Skipped as well.
	Held uint64

	// Connected is how many publishers have a connection now.
	Connected int
	// Lost counts connections that ended before we closed them, and dials that
	// failed.
	Lost uint64
	// Moved counts publishers' changes of broker that were carried through.
	Moved uint64
	// Strange counts what a server may not send: malformed frames, answers to
	// nothing.
	Strange uint64
	// LastError says why the last connection was lost, for people.
	LastError string

	// Lateness is the time from the intended send time to the write.
	Lateness *obs.Latency
	// Answer is the time from the intended send time to the OK.
	Answer *obs.Latency
	// FirstAccepted and LastAccepted are the times of the first and the last
	// OK; 0 without one.
	FirstAccepted, LastAccepted mono.Time
}

func newStats() Stats {
	return Stats{Refused: map[string]uint64{}, Lateness: obs.NewLatency(), Answer: obs.NewLatency()}
}

// RefusedTotal sums Refused.
func (s *Stats) RefusedTotal() uint64 {
	var n uint64
	for _, v := range s.Refused {
		n += v
	}
	return n
}

func (s *Stats) refuse(code string, messages uint64) {
	if _, known := s.Refused[code]; !known {
		kept := len(s.Refused)
		if s.Refused[OtherCode] > 0 {
			kept--
		}
		if kept >= maxCodes {
			code = OtherCode
		}
	}
	s.Refused[code] += messages
}

// clone returns a copy that shares nothing with s.
func (s *Stats) clone() Stats {
	c := *s
	c.Refused = maps.Clone(s.Refused)
	c.Lateness, c.Answer = obs.NewLatency(), obs.NewLatency()
	c.Lateness.Merge(s.Lateness)
	c.Answer.Merge(s.Answer)
	return c
}

func (s *Stats) add(o *Stats) {
	s.Offered += o.Offered
	s.Sent += o.Sent
	s.Accepted += o.Accepted
	for code, n := range o.Refused {
		s.refuse(code, n)
	}
	s.Unanswered += o.Unanswered
	s.Skipped += o.Skipped
	s.Held += o.Held
	s.Connected += o.Connected
	s.Lost += o.Lost
	s.Moved += o.Moved
	s.Strange += o.Strange
	if o.LastError != "" {
		s.LastError = o.LastError
	}
	s.Lateness.Merge(o.Lateness)
	s.Answer.Merge(o.Answer)
	if o.FirstAccepted != 0 && (s.FirstAccepted == 0 || o.FirstAccepted < s.FirstAccepted) {
		s.FirstAccepted = o.FirstAccepted
	}
	s.LastAccepted = max(s.LastAccepted, o.LastAccepted)
}
