package schedule

import (
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Source is one publisher: one sensor, one connection.
type Source struct {
	// ID is unique in its fleet; 1 .. 64 bytes.
	ID string
	// Key is the correlation key, empty for none.
	Key string
	// Rate is the mean in messages per second.
	Rate float64
	// Batch is how many messages it sends back to back; at least 1.
	Batch int
}

// Event is one act of sending: at the offset At from the start of the run,
// source number Source sends Count messages of Size bytes back to back.
type Event struct {
	At     time.Duration
	Source int32
	Count  int32
	Size   int32
}

// Stream yields events in order of At. After the first false it yields
// nothing more. It is not safe for concurrent use.
type Stream interface {
	Next() (Event, bool)
}

// Until returns the events of s that lie before end. It reads s one event past
// the end.
func Until(s Stream, end time.Duration) Stream { return &until{s: s, end: end} }

type until struct {
	s    Stream
	end  time.Duration
	over bool
}

func (u *until) Next() (Event, bool) {
	if u.over {
		return Event{}, false
	}
	e, ok := u.s.Next()
	if !ok || e.At >= u.end {
		u.over = true
		return Event{}, false
	}
	return e, true
}

// Shard returns the events of s whose source has the number shard modulo of,
// so that `of` shards over equal streams yield every event once.
//
// Requires: 0 <= shard < of.
func Shard(s Stream, shard, of int) Stream {
	if shard < 0 || shard >= of {
		panic(fmt.Sprintf("shard %d of %d", shard, of))
	}
	if of == 1 {
		return s
	}
	return Only(s, func(e Event) bool { return int(e.Source)%of == shard })
}

// Only returns the events of s that are kept.
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

// Arrivals reads s to its end and returns when every message is sent, the run beginning
// at 0.
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
