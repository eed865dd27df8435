package conn

// DrainPublishers ends the connections of publishers that belong elsewhere now:
// those that identified themselves with one of the ids, do not subscribe, and
// have published to the topic, or to none yet. Each ends at a message boundary:
// what was read is answered, and the close is in order, so a publisher knows of
// every message whether it was accepted. It returns how many there were, and
// does not wait for them.
func (s *Server) DrainPublishers(topic string, ids map[string]bool) int {
	n := 0
	s.clients.each(func(c *client) {
		if c.publishesTo(topic, ids) {
			c.stop()
			n++
		}
	})
	return n
}

// publishesTo is safe to call while the client goes on.
func (c *client) publishesTo(topic string, ids map[string]bool) bool {
	l := &c.stats
	id := l.identity.Load()
	if id == nil || !ids[id.ClientID] || l.sub.Load() != nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.published {
		if p.topic == topic || p.topic == otherTopics {
			return true
		}
	}
	return len(l.published) == 0
}
