package conn

// Bodies returns the bytes that count against Config.MaxBodies.
func (s *Server) Bodies() int64 {
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	return s.memory.mu.used
}
