package session

import (
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/mqtt/packet"
	nsq "github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Bits of the first byte of a PUBLISH.
const (
	flagRetain = 1
	flagQoS1   = 2
	flagQoS2   = 4
	flagDup    = 8
)

// publish decodes a PUBLISH. Attribute, Publisher and an envelope are in the arena.
func (s *Session) publish(first byte, r *packet.Reader, op *nsq.Op) *Error {
	name := r.Binary()
	var forwarded []byte
	if first&flagQoS1 != 0 {
		if op.Packet = r.Uint16(); op.Packet == 0 && !r.Failed {
			return violation("PUBLISH with the packet identifier 0")
		}
	}
	if s.version == packet.V5 {
		if len(r.Rest) > 0 && r.Rest[0] == 0 { // no properties
			r.Rest = r.Rest[1:]
		} else {
			p := properties{arena: s.arena, start: len(s.arena)}
			if err := readProperties(r, packet.Publish, &p); err != nil {
				return err
			}
			s.arena, forwarded = p.arena, p.arena[p.start:]
			if p.has(packet.TopicAlias) && !r.Failed {
				var err *Error
				if name, err = s.aliases.name(int(p.values[packet.TopicAlias]), name, s.cfg.MaxAliases); err != nil {
					return err
				}
			}
		}
	}
	if r.Failed {
		return misfit(packet.Publish)
	}
	err := names.CheckName(name)
	if err != nil && !errors.Is(err, names.ErrLimit) {
		return &Error{Reason: BadTopicName, Text: "the topic name of a PUBLISH " + err.Error()}
	}
	if op.Packet != 0 {
		if s.version == packet.V5 && s.unacknowledged == s.cfg.MaxInflight {
			return &Error{Reason: TooManyPublishes, Text: "more unacknowledged publishes than the receive maximum"}
		}
		s.unacknowledged++
	}
	op.Kind, op.Body, op.MQTT = nsq.OpPub, r.Rest, &s.extra
	s.extra.Attribute, s.extra.Publisher = nil, nil
	s.extra.Retain, s.extra.Dropped = first&flagRetain != 0, false
	var target names.Target
	mapped := false
	if err == nil {
		target, s.arena, mapped = s.rules.Map(name, s.arena)
	}
	if !mapped {
		// The name is no valid name of an SRTM topic, so the driver's refusal comes in its order. The
		// broker's error repeats the name.
		op.Topic = name[:min(len(name), wire.MaxNameLength+1)]
		return nil
	}
	op.Topic, s.extra.Publisher = target.Topic, target.Publisher
	a := names.Attribute{Name: name, Envelope: target.Envelope, AtMostOnce: op.Packet == 0, Origin: s.origin, Properties: forwarded}
	if len(forwarded) > 0 && !a.Fits() {
		a.Properties, s.extra.Dropped = nil, true
	}
	start := len(s.arena)
	s.arena = a.Append(s.arena)
	s.extra.Attribute = s.arena[start:len(s.arena):len(s.arena)]
	if target.Envelope {
		start = len(s.arena)
		s.arena = s.appendEnvelope(s.arena, name, op.Body)
		op.Body = s.arena[start:len(s.arena):len(s.arena)]
	}
	return nil
}

func (s *Session) appendEnvelope(dst, name, payload []byte) []byte {
	s.published++
	return names.AppendEnvelope(dst, &names.Event{
		Client: s.clientID, Series: uint64(s.connectedAt), Sequence: s.published, Time: s.wall, Name: name, Payload: payload,
	})
}

// aliases has the topic names of topic aliases, by alias - 1. nil: the client has not set the alias.
type aliases [][]byte

// name returns the topic name of a PUBLISH with a topic alias, and sets the alias if the packet has a
// name.
func (a *aliases) name(alias int, name []byte, limit int) ([]byte, *Error) {
	if alias == 0 || alias > limit {
		return nil, &Error{Reason: BadTopicAlias, Text: "a topic alias outside of the topic alias maximum"}
	}
	if len(name) == 0 {
		if alias > len(*a) || (*a)[alias-1] == nil {
			return nil, violation("PUBLISH with a topic alias that the client has not set")
		}
		return (*a)[alias-1], nil
	}
	if len(name) > names.MaxName {
		return name, nil // refused in any case, and too long to keep
	}
	for len(*a) < alias {
		*a = append(*a, nil)
	}
	if string((*a)[alias-1]) != string(name) {
		// Operations that are not answered may refer to the old name.
		(*a)[alias-1] = append([]byte(nil), name...)
	}
	return name, nil
}

// answerPublish appends the PUBACK of a publish, or ends the session of a 3.1.1 client, for which there is
// no refusal.
func (s *Session) answerPublish(op *nsq.Op, err error) {
	if op.Packet != 0 {
		s.unacknowledged--
	}
	reason := ReasonOf(err)
	switch {
	case s.version == packet.V311 && err != nil:
		if op.Packet != 0 || reason != QuotaExceeded {
			s.close(errorOf(err))
		}
	case op.Packet == 0:
	case err == nil:
		s.out = append(s.out, byte(packet.Puback), 2, byte(op.Packet>>8), byte(op.Packet))
	default:
		s.out = appendPacket(s.out, packet.Puback, func(dst []byte) []byte {
			dst = append(binary.BigEndian.AppendUint16(dst, op.Packet), byte(reason.valid(packet.Puback)))
			return s.appendReason(dst, textOf(err), "")
		})
	}
}

// Source is a broker subscription of the client: a channel of an SRTM topic.
type Source struct {
	Topic   string
	Channel string
	Number  uint16 // the driver's number of the source
}

// Outcome says what AppendMessage did with a message.
type Outcome uint8

// Outcomes of AppendMessage.
const (
	Unwanted Outcome = iota // nothing appended, the client does not want the message: the driver finishes it
	TooLarge                // nothing appended, larger than the client's maximum: the driver finishes it
	Blocked                 // nothing appended, the window is empty: the driver requeues the message
	SentOnce                // appended with QoS 0: the driver finishes the message
	Sent                    // appended with QoS 1: OpFin follows
)

// AppendMessage appends the PUBLISH packet of a source's message to dst. A message without an MQTT name
// has the name of its SRTM topic.
func (s *Session) AppendMessage(dst []byte, source *Source, m *wire.Message, attribute []byte) ([]byte, Outcome) {
	a, named := names.ParseAttribute(attribute)
	var own [wire.MaxNameLength]byte
	if !named {
		a.Name = append(own[:0], source.Topic...)
	}
	wanted, qos, idSize := false, byte(0), 0
	var room [8]uint32
	ids := room[:0]
	for i := range s.filters {
		f := &s.filters[i]
		if !selects(f, source, &a, named, s.origin) {
			continue
		}
		wanted, qos = true, max(qos, f.QoS)
		if f.ID != 0 && s.version == packet.V5 {
			ids = append(ids, f.ID)
			idSize += 1 + lengthSize(int(f.ID))
		}
	}
	if a.AtMostOnce {
		qos = 0
	}
	expires := len(a.Properties) >= 5 && a.Properties[0] == byte(packet.MessageExpiry)
	left := int64(0) // seconds until the message expires
	if expires {
		left = int64(binary.BigEndian.Uint32(a.Properties[1:])) - max(0, int64(s.wall)-m.Timestamp)/int64(time.Second)
		wanted = wanted && left > 0
	}
	var number uint16 // packet identifier of an earlier delivery on this connection
	if qos > 0 && m.Attempts > 1 {
		number = s.inflight.find(m.ID, source.Number)
	}
	switch {
	case !wanted || s.state != open:
		return dst, Unwanted
	case qos > 0 && number == 0 && s.Window() == 0:
		return dst, Blocked
	}
	fields := 2 + len(a.Name) + 2*int(qos)
	if s.version == packet.V5 {
		fields += lengthSize(idSize+len(a.Properties)) + idSize + len(a.Properties)
	}
	// The payload of an envelope is smaller than the envelope, so the header may become shorter.
	start, header := len(dst), 1+lengthSize(fields+len(m.Body))
	dst = slices.Grow(dst, header+fields+len(m.Body))
	dst = packet.AppendText(dst[:start+header], a.Name)
	at := len(dst)
	if qos > 0 {
		dst = append(dst, 0, 0)
	}
	if s.version == packet.V5 {
		dst = append(packet.AppendLength(dst, idSize+len(a.Properties)), a.Properties...)
		if expires {
			binary.BigEndian.PutUint32(dst[len(dst)-len(a.Properties)+1:], uint32(left))
		}
		for _, id := range ids {
			dst = packet.AppendLength(append(dst, byte(packet.SubscriptionID)), int(id))
		}
	}
	if a.Envelope {
		dst = names.AppendPayload(dst, m.Body)
	} else {
		dst = append(dst, m.Body...)
	}
	size := len(dst) - start - header
	if size+1+lengthSize(size) > int(s.maxPacket) {
		return dst[:start], TooLarge
	}
	first := byte(packet.Publish) | qos<<1
	if qos > 0 {
		if number == 0 {
			number = s.inflight.add(m.ID, source.Number)
		}
		binary.BigEndian.PutUint16(dst[at:], number)
		if m.Attempts > 1 {
			first |= flagDup
		}
	}
	if shorter := 1 + lengthSize(size); shorter < header {
		copy(dst[start+shorter:], dst[start+header:])
		dst = dst[:start+shorter+size]
	}
	packet.AppendLength(append(dst[:start], first), size)
	if qos > 0 {
		return dst, Sent
	}
	return dst, SentOnce
}

// selects reports whether a filter wants a message. origin is the tag of the client's own messages.
func selects(f *nsq.Filter, source *Source, a *names.Attribute, named bool, origin uint64) bool {
	if f.Channel != source.Channel || f.NoLocal && a.Origin == origin && named {
		return false
	}
	if names.Match(f.Filter, a.Name) {
		return true
	}
	// NSQ consumers may share the channel of a complete filter. So its consumers take all messages that
	// NSQ clients have published.
	return !named && f.Share == f.Channel && f.Share != ""
}

// Window returns how many QoS 1 messages may still be sent.
func (s *Session) Window() int { return max(0, int(s.window)-s.inflight.count) }

// puback decodes a PUBACK. An unknown packet identifier has no effect.
func (s *Session) puback(r *packet.Reader, op *nsq.Op) *Error {
	number := r.Uint16()
	if s.version == packet.V5 && len(r.Rest) > 0 {
		r.Byte() // a refused message is finished, too
		if len(r.Rest) > 0 {
			if err := readProperties(r, packet.Puback, new(properties)); err != nil {
				return err
			}
		}
	}
	if r.Failed || len(r.Rest) > 0 {
		return misfit(packet.Puback)
	}
	id, source, found := s.inflight.remove(number)
	if found {
		s.extra.Source = source
		op.Kind, op.ID, op.MQTT = nsq.OpFin, id, &s.extra
	}
	return nil
}

// flight is a message that the client has not acknowledged.
type flight struct {
	id     wire.MessageID
	source uint16
	packet uint16 // 0: the slot is free
}

// maxInflight is the maximum number of unacknowledged messages. It leaves free packet identifiers.
const maxInflight = 1<<15 - 1

// inflight is the table of unacknowledged messages. A message lies in the slot of its packet identifier
// modulo the number of slots, so no operation searches. The zero value is empty.
type inflight struct {
	slots []flight // the length is a power of two, or 0
	count int
	last  uint16 // last packet identifier
}

// find returns the packet identifier of a message, or 0.
func (t *inflight) find(id wire.MessageID, source uint16) uint16 {
	for i := range t.slots {
		if f := &t.slots[i]; f.packet != 0 && f.id == id && f.source == source {
			return f.packet
		}
	}
	return 0
}

// add adds a message and returns its packet identifier. Requires: count < maxInflight.
func (t *inflight) add(id wire.MessageID, source uint16) uint16 {
	if t.count == len(t.slots) {
		t.resize(max(4, 2*len(t.slots)))
	}
	for {
		t.last++
		if f := &t.slots[int(t.last)&(len(t.slots)-1)]; t.last != 0 && f.packet == 0 {
			*f = flight{id, source, t.last}
			t.count++
			return t.last
		}
	}
}

// resize moves the messages to a table of another size. Packet identifiers that differ in the smaller table's
// slots also differ in the larger table's.
func (t *inflight) resize(size int) {
	old := t.slots
	t.slots = make([]flight, size)
	for _, f := range old {
		if f.packet != 0 {
			t.slots[int(f.packet)&(size-1)] = f
		}
	}
}

// remove removes the message with a packet identifier.
func (t *inflight) remove(packet uint16) (id wire.MessageID, source uint16, found bool) {
	if t.count == 0 || packet == 0 {
		return id, 0, false
	}
	f := &t.slots[int(packet)&(len(t.slots)-1)]
	if f.packet != packet {
		return id, 0, false
	}
	id, source = f.id, f.source
	*f = flight{}
	t.count--
	return id, source, true
}
