package conn

// DrainPublishers closes the connections of publishers that must move to another broker. It returns
// their number and does not wait for them. It selects clients that identified themselves with one
// of the ids, do not subscribe, and have published to the topic or not at all. Each connection ends
// in order at a message boundary, after the replies to all commands that were read. So a publisher
// knows of every message whether the broker accepted it.
func (s *Server) DrainPublishers(topic string, ids map[string]bool) int {
	n := 0
	s.clients.each(func(c *client) {
		if c.stats.publishesTo(topic, ids) {
			c.mqtt.MovePublisher(topic)
			c.stop()
			n++
		}
	})
	return n
}

// publishesTo may run while the client is active.
func (s *connStats) publishesTo(topic string, ids map[string]bool) bool {
	id := s.identity.Load()
	if id == nil || !ids[id.ClientID] || s.sub.Load() != nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.published {
		if p.topic == topic || p.topic == otherTopics {
			return true
		}
	}
	return len(s.published) == 0
}
