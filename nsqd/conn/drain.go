package conn

import "slices"

// DrainPublishers closes the connections of publishers that must move to another broker. It returns
// their number and does not wait for them. It selects clients that identified themselves with one
// of the ids, do not subscribe, and have published to the topic or not at all. Each connection ends
// in order at a message boundary, after the replies to all commands that were read. So a publisher
// knows of every message whether the broker accepted it.
//
// If this broker forwards, MQTT connections stay open, and their next publishes to the topic go to the
// publisher's broker. Clients that follow server references connect there later.
func (s *Server) DrainPublishers(topic string, ids map[string]bool) int {
	n := 0
	s.clients.each(func(c *client) {
		moves := false
		if c.mqtt != nil && s.cfg.Forward != nil {
			moves = c.stats.forwardFromNow(topic, ids)
			moves = c.mqtt.FollowHome(topic, ids) || moves
		} else if moves = c.stats.publishesTo(topic, ids); moves {
			c.mqtt.MovePublisher(topic)
			c.stop()
		}
		if moves {
			n++
		}
	})
	return n
}

// forwardFromNow marks the topic as moved, if the client has published to the topic as one of the ids. It may
// run while the client is active.
func (s *connStats) forwardFromNow(topic string, ids map[string]bool) bool {
	id := s.identity.Load()
	if id == nil || !ids[id.ClientID] {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.published, func(p *pubCount) bool { return p.topic == topic })
	if i >= 0 {
		s.published[i].moved.Store(true)
	}
	return i >= 0
}

// movedAway reports whether publishes to the topic must be forwarded. Only the reader calls it.
func (s *connStats) movedAway(topic []byte) bool {
	return slices.ContainsFunc(s.published, func(p *pubCount) bool { return p.topic == string(topic) && p.moved.Load() })
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
