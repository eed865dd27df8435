// Package history keeps what a console has observed of a topic over the last hour:
// samples of its rates and delays, the shares of its brokers, and events. The package is
// pure: the caller passes the time. It depends on neither the API nor pages.
package history

import (
	"maps"
	"slices"
	"time"
)

// Bounds of one topic's history.
const (
	// Span is the length of the history.
	Span = time.Hour
	// MaxSamples is the maximum number of samples: one per second.
	MaxSamples = int(Span / time.Second)
	// MaxEvents is the maximum number of events.
	MaxEvents = 200
	// maxBrokers is the maximum number of brokers with shares.
	maxBrokers = 100
)

// Parts of a message's delay. Delivery, the subject of the SLO, is Access plus Broker.
const (
	Access = iota
	Broker
	Consumer
	Delivery
	Parts
)

// Delay holds quantiles of one part, in milliseconds.
type Delay struct{ P50, P99, P999 float32 }

// Sample is the state of a topic at one time.
type Sample struct {
	At                                    int64   // Unix milliseconds
	Offered, Released, Delivered, Refused float32 // msg/s
	Backlog                               float32 // messages waiting for tokens
	Exceeded                              float32 // fraction of deliveries later than the SLO's latency
	Delays                                [Parts]Delay
	Shares                                []float32 // msg/s, in the order of Series.Brokers
}

// Event is an event of a topic.
type Event struct {
	At   int64  // Unix milliseconds
	Kind string // "fit", "move", "state", "action"
	Text string
}

// Series is the history of one topic. The zero value is empty. It is not safe for
// concurrent use.
type Series struct {
	brokers []string
	samples []Sample
	events  []Event
}

// Add adds a sample with the brokers' shares, in msg/s, and drops samples older than
// Span. It ignores a sample that is not later than the last.
func (s *Series) Add(sample Sample, shares map[string]float32) {
	if n := len(s.samples); n > 0 && s.samples[n-1].At >= sample.At {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(shares)) {
		if !slices.Contains(s.brokers, name) && len(s.brokers) < maxBrokers {
			s.brokers = append(s.brokers, name)
		}
	}
	sample.Shares = make([]float32, len(s.brokers))
	for i, name := range s.brokers {
		sample.Shares[i] = shares[name]
	}
	s.samples = append(s.samples, sample)
	drop := max(0, len(s.samples)-MaxSamples)
	for drop < len(s.samples) && s.samples[drop].At <= sample.At-Span.Milliseconds() {
		drop++
	}
	s.samples = slices.Delete(s.samples, 0, drop)
}

// Note adds an event.
func (s *Series) Note(e Event) {
	s.events = append(s.events, e)
	s.events = slices.Delete(s.events, 0, max(0, len(s.events)-MaxEvents))
}

// Since returns a copy of the samples after a time in Unix milliseconds, oldest first.
func (s *Series) Since(at int64) []Sample {
	i, _ := slices.BinarySearchFunc(s.samples, at+1, func(sample Sample, at int64) int { return int(sample.At - at) })
	return slices.Clone(s.samples[i:])
}

// Last returns the newest sample; false without samples.
func (s *Series) Last() (Sample, bool) {
	if len(s.samples) == 0 {
		return Sample{}, false
	}
	return s.samples[len(s.samples)-1], true
}

// Brokers returns the brokers with shares in the samples. It never returns nil, because
// scripts would receive null.
func (s *Series) Brokers() []string { return append([]string{}, s.brokers...) }

// Events returns the events, newest first.
func (s *Series) Events() []Event {
	events := slices.Clone(s.events)
	slices.Reverse(events)
	return events
}

// Bytes estimates the memory of the history.
func (s *Series) Bytes() int {
	n := 0
	for _, sample := range s.samples {
		n += 112 + 4*cap(sample.Shares)
	}
	for _, e := range s.events {
		n += 48 + len(e.Text)
	}
	return n
}
