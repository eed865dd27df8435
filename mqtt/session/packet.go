package session

import (
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/mqtt/packet"
)

// maxControl is the maximum size in bytes of a packet other than PUBLISH, as Config.MaxPacketSize is for
// PUBLISH. The client is unauthenticated until its CONNECT is there.
const maxControl = 64 << 10

// propertySet has bit 1<<p for each property p.
type propertySet uint64

func setOf(properties ...packet.Property) (set propertySet) {
	for _, p := range properties {
		set |= 1 << p
	}
	return set
}

func (set propertySet) has(p packet.Property) bool { return set&(1<<p) != 0 }

// allowed returns the properties that a client may send in a packet of the given kind. 0 means the
// properties of a will.
func allowed(k packet.Kind) propertySet {
	message := forReceivers()
	switch k {
	case packet.Connect:
		return setOf(packet.SessionExpiry, packet.AuthMethod, packet.AuthData, packet.ProblemInfo, packet.ResponseInfo, packet.ReceiveMaximum, packet.AliasMaximum, packet.UserProperty, packet.MaximumPacket)
	case packet.Publish:
		return message | setOf(packet.TopicAlias)
	case packet.Subscribe:
		return setOf(packet.SubscriptionID, packet.UserProperty)
	case packet.Unsubscribe:
		return setOf(packet.UserProperty)
	case packet.Disconnect:
		return setOf(packet.SessionExpiry, packet.ReasonString, packet.UserProperty)
	case packet.Puback:
		return setOf(packet.ReasonString, packet.UserProperty)
	}
	return message | setOf(packet.WillDelay)
}

// forReceivers returns the properties of a message that the server forwards to receivers.
func forReceivers() propertySet {
	return setOf(packet.PayloadFormat, packet.MessageExpiry, packet.ContentType, packet.ResponseTopic, packet.CorrelationData, packet.UserProperty)
}

// maxUserProperties limits the user properties of a packet.
const maxUserProperties = 64

// properties are the properties of a packet.
type properties struct {
	propertySet
	values   [packet.MaximumPacket + 1]uint32 // of integers
	redirect bool

	// arena[start:] has the properties for receivers, as in an attribute. Its owner sets both.
	arena []byte
	start int
}

// readProperties reads the properties of a packet.
func readProperties(r *packet.Reader, k packet.Kind, p *properties) *Error {
	fields := r.Properties()
	users := 0
	for set := allowed(k); len(fields.Rest) > 0; {
		field := fields.Rest
		id, value, name, text := fields.Property()
		if id == packet.UserProperty {
			users++
		}
		switch {
		case id > packet.MaximumPacket || !set.has(id):
			return violation("property %d in %v", id, k)
		case p.has(id) && id != packet.UserProperty:
			return violation("property %d twice", id)
		case users > maxUserProperties:
			return &Error{Reason: QuotaExceeded, Text: "more than 64 user properties"}
		case fields.Failed:
			r.Failed = true
			return nil
		case id.Flag() && value > 1, value == 0 && setOf(packet.MaximumPacket, packet.ReceiveMaximum, packet.SubscriptionID).has(id):
			return violation("property %d with the value %d", id, value)
		}
		p.propertySet |= 1 << id
		p.values[id] = value
		p.redirect = p.redirect || string(name) == packet.RedirectProperty && string(text) == "1"
		if id == packet.MessageExpiry {
			p.arena = slices.Insert(p.arena, p.start, field[:5]...)
		} else if forReceivers().has(id) && len(p.arena)-p.start <= names.MaxAttribute {
			p.arena = append(p.arena, field[:len(field)-len(fields.Rest)]...)
		}
	}
	return nil
}

// lengthSize returns the size of a variable byte integer.
func lengthSize(v int) int {
	switch {
	case v < 1<<7:
		return 1
	case v < 1<<14:
		return 2
	case v < 1<<21:
		return 3
	}
	return 4
}

const (
	// maxReasonText limits the reason strings that the server sends, in bytes.
	maxReasonText = 200
	// maxReferral is the maximum size of a DISCONNECT with a server reference, in bytes. A client whose
	// maximum is smaller is not redirected.
	maxReferral = 512
)

// appendReason appends properties: the text as reason string, and the server reference. It appends no
// text if the client does not want texts.
func (s *Session) appendReason(dst []byte, text, reference string) []byte {
	return appendSized(dst, func(dst []byte) []byte {
		if reference != "" {
			dst = packet.AppendText(append(dst, byte(packet.ServerReference)), reference)
		}
		if text = text[:min(len(text), maxReasonText)]; text != "" && !s.terse && utf8.ValidString(text) {
			dst = packet.AppendText(append(dst, byte(packet.ReasonString)), text)
		}
		return dst
	})
}

// appendPacket appends a packet of the given kind, whose fields append adds.
func appendPacket(dst []byte, k packet.Kind, fields func(dst []byte) []byte) []byte {
	return appendSized(append(dst, byte(k)), fields)
}

// appendSized appends the size of the fields and the fields. Requires: the fields take less than 16 KiB.
func appendSized(dst []byte, fields func(dst []byte) []byte) []byte {
	start := len(dst)
	dst = fields(append(dst, 0))
	size := len(dst) - start - 1
	if size >= 0x80 {
		dst = append(dst, 0)
		copy(dst[start+2:], dst[start+1:])
		dst[start+1] = byte(size >> 7)
		size = size&0x7f | 0x80
	}
	dst[start] = byte(size)
	return dst
}

// misfit is the error of a packet whose fields are longer or shorter than the packet.
func misfit(k packet.Kind) *Error {
	return malformed("the fields of %v do not fit its remaining length", k)
}

func malformed(format string, args ...any) *Error {
	return &Error{Reason: Malformed, Text: fmt.Sprintf(format, args...)}
}

func violation(format string, args ...any) *Error {
	return &Error{Reason: ProtocolError, Text: fmt.Sprintf(format, args...)}
}
