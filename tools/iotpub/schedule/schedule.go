// Package schedule decides when emulated publishers send. A schedule is a stream of events
// in time order, and the same seed gives the same stream. The package is pure: it uses no
// clock, no socket and no message. Offsets count from the start of a run.
// tools/iotpub/trace makes such streams from recorded events, and tools/iotpub/fleet sends
// them.
package schedule

import (
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Source is one publisher, a sensor with a connection.
type Source struct {
	// ID is unique in the fleet; 1 .. 64 bytes.
	ID string
	// Key is the correlation key, empty for none.
	Key string
	// Rate is the mean rate in messages per second.
	Rate float64
	// Batch is the number of messages sent back to back; at least 1.
	Batch int
}

// Event is one send operation. At the offset At from the start of the run, Source sends
// Count messages of Size bytes back to back.
type Event struct {
	At     time.Duration
	Source int32
	Count  int32
	Size   int32
}

// Stream yields events in order of At. After the first false the stream yields nothing
// more. A Stream is not safe for concurrent use.
type Stream interface {
	Next() (Event, bool)
}

// Until returns the events of s before end. It reads one event beyond end from s.
func Until(s Stream, end time.Duration) Stream { return &until{s: s, end: end} }

type until struct {
	s     Stream
	end   time.Duration
	ended bool
}

func (u *until) Next() (Event, bool) {
	if u.ended {
		return Event{}, false
	}
	e, ok := u.s.Next()
	if !ok || e.At >= u.end {
		u.ended = true
		return Event{}, false
	}
	return e, true
}

// Shard returns the events of s whose source modulo of is shard. The shards 0 .. of-1
// together yield every event once.
//
// Requires: 0 <= shard < of.
func Shard(s Stream, shard, shards int) Stream {
	if shard < 0 || shard >= shards {
		panic(fmt.Sprintf("shard %d of %d", shard, shards))
	}
	if shards == 1 {
		return s
	}
	return Only(s, func(e Event) bool { return int(e.Source)%shards == shard })
}

// Only returns the events of s for which keep returns true.
func Only(s Stream, keep func(Event) bool) Stream { return &only{s, keep} }

type only struct {
	s    Stream
	keep func(Event) bool
}

func (o *only) Next() (Event, bool) {
	for {
		e, ok := o.s.Next()
		if !ok || o.keep(e) {
			return e, ok
		}
	}
}

// Arrivals reads s to the end and returns the send time of every message, for a run that
// begins at 0.
//
// Requires: s ends.
func Arrivals(s Stream) []mono.Time {
	var at []mono.Time
	for {
		e, ok := s.Next()
		if !ok {
			return at
		}
		for range e.Count {
			at = append(at, mono.Time(e.At))
		}
	}
}
