package engine

// line is a queue of messages in a ring that grows. The zero line is empty.
type line struct {
	ring  []message
	first int
	n     int
}

func (l *line) len() int { return l.n }

// head requires that the line is not empty.
func (l *line) head() *message { return &l.ring[l.first] }

func (l *line) push(m message) {
	if l.n == len(l.ring) {
		grown := make([]message, max(16, 2*l.n))
		copied := copy(grown, l.ring[l.first:])
		copy(grown[copied:], l.ring[:l.first])
		l.ring, l.first = grown, 0
	}
	at := l.first + l.n
	if at >= len(l.ring) {
		at -= len(l.ring)
	}
	l.ring[at] = m
	l.n++
}

// pop requires that the line is not empty.
func (l *line) pop() message {
	m := l.ring[l.first]
	if l.first++; l.first == len(l.ring) {
		l.first = 0
	}
	l.n--
	return m
}
