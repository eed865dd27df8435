package fair

import "github.com/srtm-io/srtm/internal/mono"

// Meter measures the rate of one publisher from the times at which its messages
// arrive (Level.Measure): over about an interval, so that a batch does not look
// like a rate, or the last 4 messages where an interval has fewer. What it forgets
// later makes who follows a rising rate look like one who does not want it. The
// zero Meter has seen nothing.
type Meter struct {
	last     mono.Time
	seen     bool
	messages float64 // that came after the first, old ones faded
	seconds  float64 // in which they came
}

// remember is the part of the past that a message leaves at least.
const remember = 1 - 1.0/4

// Measure counts in m a message that arrived at now and returns its publisher's
// rate, in messages per second: 0 while it is not known. A now before the last
// counts as the last.
func (l *Level) Measure(m *Meter, now mono.Time) float64 {
	if !m.seen {
		m.last, m.seen = now, true
		return 0
	}
	gap := max(0, now.Sub(m.last).Seconds())
	m.last = max(m.last, now)
	keep := max(remember, l.span/(l.span+gap))
	m.messages = m.messages*keep + 1
	m.seconds = m.seconds*keep + gap
	return m.Rate()
}

// Rate returns the rate as of the last message, in messages per second: 0 while
// it is not known.
func (m *Meter) Rate() float64 {
	if m.seconds == 0 {
		return 0
	}
	return m.messages / m.seconds
}
