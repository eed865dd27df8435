package fair

import (
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Meter measures the rate of one publisher from the times at which its messages
// arrive: over about the last 8 messages, or the last second where there are
// more in it, so that a batch does not look like a rate. The zero Meter has seen
// nothing.
type Meter struct {
	last     mono.Time
	seen     bool
	messages float64 // that came after the first, old ones faded
	seconds  float64 // in which they came
}

// forget is the part of the past that a message keeps at least: about 8 messages.
const forget = 1 - 1.0/8

// Message counts a message that arrived at now and returns the rate, in messages
// per second: 0 while it is not known. A now before the last counts as the last.
func (m *Meter) Message(now mono.Time) float64 {
	if !m.seen {
		m.last, m.seen = now, true
		return 0
	}
	gap := max(0, now.Sub(m.last).Seconds())
	m.last = max(m.last, now)
	keep := max(forget, 1/(1+gap/time.Second.Seconds()))
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
