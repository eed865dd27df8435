package fair

import "github.com/srtm-io/srtm/internal/mono"

// Meter measures the rate of one publisher from the arrival times of its messages (Level.Measure).
// It covers about an interval, so that a batch does not look like a rate, or the last 4 messages if
// an interval has fewer. A longer memory would underestimate a publisher that is still ramping up
// to a higher rate. The zero Meter has no messages.
type Meter struct {
	last     mono.Time
	started  bool
	messages float64 // after the first message; old messages fade
	seconds  float64 // duration of messages
}

// minDecay is the minimum fraction of the past that each message keeps.
const minDecay = 1 - 1.0/4

// Measure adds a message that arrived at now to m. It returns the publisher's rate in messages per
// second, or 0 while unknown. A now before the last message counts as the time of the last message.
func (l *Level) Measure(m *Meter, now mono.Time) float64 {
	if !m.started {
		m.last, m.started = now, true
		return 0
	}
	gap := max(0, now.Sub(m.last).Seconds())
	m.last = max(m.last, now)
	decay := max(minDecay, l.span/(l.span+gap))
	m.messages = m.messages*decay + 1
	m.seconds = m.seconds*decay + gap
	return m.Rate()
}

// Rate returns the rate at the last message in messages per second, or 0 while unknown.
func (m *Meter) Rate() float64 {
	if m.seconds == 0 {
		return 0
	}
	return m.messages / m.seconds
}
