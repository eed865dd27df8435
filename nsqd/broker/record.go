package broker

import (
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// record encodes a message for the log. Requires: the topic's mu held.
func (e epoch) record(m *queue.Message, released bool) commitlog.Record {
	at := e.wallOf(m.Arrival)
	r := commitlog.Record{
		Offset: commitlog.Offset(m.Offset), ID: m.ID, Timestamp: m.Timestamp, Arrival: at, Source: m.Source,
		Attempts: m.Attempts, Body: m.Body,
	}
	if m.Defer > 0 {
		r.Due = at + mono.Wall(m.Defer)
	}
	if released {
		r.Access = m.Access + 1
	}
	if m.Only != nil {
		r.Channel = []byte(*m.Only)
	}
	return r
}

// restored decodes a message from the log and copies the body. The arrival is now at the
// latest: if the wall clock was set back since the write, the message would seem to come
// from the future, and would wait.
func (b *shared) restored(r *commitlog.Record) *queue.Message {
	e, now := b.cfg.Storage.epoch, b.now()
	m := b.pool.get(len(r.Body))
	m.ID, m.Body = r.ID, append(m.Body, r.Body...)
	m.Timestamp = r.Timestamp
	m.Arrival, m.Source = e.monoOf(r.Arrival), r.Source
	m.Defer = 0
	if r.Due > 0 {
		m.Defer = max(0, e.monoOf(r.Due).Sub(m.Arrival))
	}
	if early := m.Arrival.Sub(now); early > 0 {
		m.Arrival = m.Arrival.Add(-early)
	}
	m.Offset, m.Only, m.Attempts = queue.Offset(r.Offset), nil, r.Attempts
	if len(r.Channel) > 0 {
		only := string(r.Channel)
		m.Only = &only
	}
	m.Access, m.Held = max(0, r.Access-1), 0
	m.Released = m.Arrival.Add(m.Access)
	return m
}

// epoch is one moment on both clocks. Steps of the wall clock do not affect records, since
// Storage.epoch is the same moment for writing and reading. When cursors are saved, the
// epoch is the moment of saving: another process reads the cursors, and uses the wall clock
// of its time.
type epoch struct {
	mono mono.Time
	wall mono.Wall
}

func (e epoch) wallOf(m mono.Time) mono.Wall { return e.wall + mono.Wall(m-e.mono) }
func (e epoch) monoOf(w mono.Wall) mono.Time { return e.mono + mono.Time(w-e.wall) }
