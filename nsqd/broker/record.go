package broker

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// A message on disk:
//
//	 0  1  version, 1
//	 1  1  source of the arrival time (stamp.Source)
//	 2  2  attempts so far
//	 4  4  ms for which no channel took it, before it was released; see queue.Message.Held
//	 8 16  message id
//	24  8  timestamp, ns since the Unix epoch
//	32  8  arrival, ns since the Unix epoch
//	40  8  access delay in ns; -1 while it waits for its token
//	48  8  deferral in ns, from the arrival on
//	56  n  body
//
// All integers are big-endian. Arrivals are on the wall clock, because the
// monotonic one starts again with the machine; an epoch ties the two together.
const (
	recordVersion = 1
	recordHeader  = 56
	unreleased    = -1
)

// epoch is one moment on both clocks. Wall-clock steps while the process runs
// do not matter: it is the same moment for writing and for reading.
type epoch struct {
	mono stamp.Mono
	wall stamp.Wall
}

func (e epoch) wallOf(m stamp.Mono) stamp.Wall { return e.wall + stamp.Wall(m-e.mono) }
func (e epoch) monoOf(w stamp.Wall) stamp.Mono { return e.mono + stamp.Mono(w-e.wall) }

// appendRecord encodes a message. released says whether it has left the
// topic's line.
func appendRecord(dst []byte, e epoch, k queue.Kept, released bool) []byte {
	m := k.Message
	dst = append(dst, recordVersion, byte(m.Arrival.Source))
	dst = binary.BigEndian.AppendUint16(dst, k.Attempts)
	access, held := int64(unreleased), int64(0)
	if released {
		access, held = int64(m.Access), m.Held.Milliseconds()
	}
	dst = binary.BigEndian.AppendUint32(dst, uint32(min(held, math.MaxUint32)))
	dst = append(dst, m.ID[:]...)
	dst = binary.BigEndian.AppendUint64(dst, uint64(m.Timestamp))
	dst = binary.BigEndian.AppendUint64(dst, uint64(e.wallOf(m.Arrival.At)))
	dst = binary.BigEndian.AppendUint64(dst, uint64(access))
	dst = binary.BigEndian.AppendUint64(dst, uint64(m.Defer))
	return append(dst, m.Body...)
}

// parse decodes a message that has waited on disk. It arrived now, at the latest:
// if the wall clock was put back since it was written, it would seem to come from
// the future, and would wait for it.
func (t *Topic) parse(b []byte) (queue.Kept, error) {
	k, err := parseRecord(t.broker.cfg.Storage.epoch, b, &t.broker.slab)
	if err != nil {
		return k, err
	}
	m := k.Message
	if early := m.Arrival.At.Sub(t.broker.now()); early > 0 {
		m.Arrival.At = m.Arrival.At.Add(-early)
	}
	return k, nil
}

// parseRecord decodes a message into one of the slab's; the body is copied.
func parseRecord(e epoch, b []byte, from *slab) (queue.Kept, error) {
	if len(b) < recordHeader {
		return queue.Kept{}, fmt.Errorf("message record of %d bytes is shorter than its header of %d", len(b), recordHeader)
	}
	if b[0] != recordVersion {
		return queue.Kept{}, fmt.Errorf("message record of version %d, want %d", b[0], recordVersion)
	}
	if int(b[1]) >= stamp.Sources {
		return queue.Kept{}, fmt.Errorf("message record with the unknown arrival source %d", b[1])
	}
	m := from.get(len(b) - recordHeader)
	m.Body = append(m.Body, b[recordHeader:]...)
	m.Timestamp = stamp.Wall(binary.BigEndian.Uint64(b[24:]))
	m.Arrival = stamp.Arrival{
		At:     e.monoOf(stamp.Wall(binary.BigEndian.Uint64(b[32:]))),
		Source: stamp.Source(b[1]),
	}
	m.Defer = time.Duration(binary.BigEndian.Uint64(b[48:]))
	m.Ticket = 0
	copy(m.ID[:], b[8:24])
	m.Access = max(0, time.Duration(binary.BigEndian.Uint64(b[40:])))
	m.Held = time.Duration(binary.BigEndian.Uint32(b[4:])) * time.Millisecond
	m.Released = m.Arrival.At.Add(m.Access + m.Held)
	if m.Defer < 0 {
		return queue.Kept{}, fmt.Errorf("message record with a deferral of %d ns", m.Defer)
	}
	return queue.Kept{Message: m, Attempts: binary.BigEndian.Uint16(b[2:])}, nil
}
