package fleet

import (
	"github.com/srtm-io/srtm/internal/histogram"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tools/iotpub/report"
)

// maxCodes bounds the number of keys of Refused, which come from the network.
const maxCodes = 64

// OtherCode counts refusals beyond maxCodes different codes.
const OtherCode = "other"

// Stats are a fleet's counters. The unit is messages, not commands.
//
// Invariant, when the fleet has drained: Offered == Accepted + sum(Refused) + Unanswered +
// Skipped.
type Stats struct {
	report.Counts

	// Connected is the number of publishers with a connection.
	Connected int
	// Lost counts failed dials, and connections that ended before the fleet closed them.
	Lost uint64
	// Moved counts completed moves of publishers to another broker.
	Moved uint64
	// Strange counts protocol violations of the server: malformed frames, and replies
	// without a command.
	Strange uint64
	// LastError describes how the last lost connection failed, for people.
	LastError string

	// Lateness is the time from the intended send time to the write.
	Lateness *histogram.Latency
	// Answer is the time from the intended send time to the OK.
	Answer *histogram.Latency
	// LastAccepted is the time of the last OK, or 0.
	LastAccepted mono.Time
}

func newStats() Stats {
	return Stats{Counts: report.Counts{Refused: map[string]uint64{}}, Lateness: histogram.NewLatency(), Answer: histogram.NewLatency()}
}

func (s *Stats) refuse(code string, messages uint64) {
	if _, known := s.Refused[code]; !known {
		codes := len(s.Refused)
		if s.Refused[OtherCode] > 0 {
			codes--
		}
		if codes >= maxCodes {
			code = OtherCode
		}
	}
	s.Refused[code] += messages
}

// clone returns a copy that shares nothing with s.
func (s *Stats) clone() Stats {
	c := newStats()
	c.add(s)
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
	s.LastAccepted = max(s.LastAccepted, o.LastAccepted)
}
