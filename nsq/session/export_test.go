package session

// Subscribed reports whether the client has a subscription. After CLS the client keeps its subscription for FIN, REQ and
// TOUCH.
func (s *Session) Subscribed() bool { return s.state >= subscribed }
