package trace

// Publishers are in the order of their first event.
func (t *Trace) Publishers() []Publisher { return t.publishers }

// Len is the number of events.
func (t *Trace) Len() int { return len(t.events) }
