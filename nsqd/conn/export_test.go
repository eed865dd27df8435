package conn

// Bodies returns the bytes that count against Config.MaxBodies.
func (s *Server) Bodies() int64 {
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	return s.memory.mu.used
}

// EvictedOpen returns the number of evicted clients that still have their descriptors.
func (s *Server) EvictedOpen() int {
	s.clients.mu.Lock()
	defer s.clients.mu.Unlock()
	return s.clients.mu.evictedOpen
}
