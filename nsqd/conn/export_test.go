package conn

// Bodies is how many bytes count against Config.MaxBodies.
func (s *Server) Bodies() int64 {
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	return s.room.mu.all
}
