package fleet

// Open returns how many offered messages are neither answered nor given up.
func (s *Stats) Open() uint64 {
	return s.Offered - s.Accepted - s.RefusedTotal() - s.Unanswered - s.Skipped
}
