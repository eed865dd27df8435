package conn

// Bodies returns the bytes that count against Config.MaxBodies.
func (s *Server) Bodies() int64 {
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	return s.room.mu.all
}
