package fleet

// Open is how many messages are offered and neither answered nor given up.
func (s *Stats) Open() uint64 {
	return s.Offered - s.Accepted - s.RefusedTotal() - s.Unanswered - s.Skipped
}
