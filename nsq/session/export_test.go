package session

// Subscribed reports whether the client has a subscription. After CLS it still
// has, for its FIN, REQ and TOUCH.
func (s *Session) Subscribed() bool { return s.state >= subscribed }
