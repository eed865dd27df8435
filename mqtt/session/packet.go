package session

import (
	"encoding/binary"
	"fmt"
	"unicode/utf8"
)

// kind is the type of a packet, the upper half of its first byte.
type kind byte

// Types of packets.
const (
	connect     kind = 1
	connack     kind = 2
	publish     kind = 3
	puback      kind = 4
	pubrec      kind = 5
	pubrel      kind = 6
	pubcomp     kind = 7
	subscribe   kind = 8
	suback      kind = 9
	unsubscribe kind = 10
	unsuback    kind = 11
	pingreq     kind = 12
	pingresp    kind = 13
	disconnect  kind = 14
	auth        kind = 15
)

// String returns the packet's name in the specification.
func (k kind) String() string {
	return [...]string{
		"packet 0", "CONNECT", "CONNACK", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBSCRIBE",
		"SUBACK", "UNSUBSCRIBE", "UNSUBACK", "PINGREQ", "PINGRESP", "DISCONNECT", "AUTH",
	}[k&15]
}

// maxControl is the maximum size in bytes of a packet other than PUBLISH, as Config.MaxPacketSize is for
// PUBLISH. Nobody has checked the client before the CONNECT is there.
const maxControl = 64 << 10

// parseHeader returns the size of the packet at the start of in, with the fixed header, and the size of
// the fixed header. If in does not have the whole fixed header, size is 0.
func parseHeader(in []byte) (size, header int, err *Error) {
	length := 0
	for i := 1; i < len(in); i++ {
		if i == 5 {
			return 0, 0, malformed("the remaining length has more than 4 bytes")
		}
		length |= int(in[i]&0x7f) << (7 * (i - 1))
		if in[i] < 0x80 {
			if i > 1 && in[i] == 0 {
				return 0, 0, malformed("the remaining length has more bytes than necessary")
			}
			return 1 + i + length, 1 + i, nil
		}
	}
	return 0, 0, nil
}

// reader decodes the fields of a packet. The first failure sets failed and empties the rest, so the next
// reads fail, too. Callers check failed once, after the last field.
type reader struct {
	rest   []byte
	failed bool
}

func (r *reader) take(n int) []byte {
	if n > len(r.rest) {
		r.rest, r.failed = nil, true
		return nil
	}
	field := r.rest[:n:n]
	r.rest = r.rest[n:]
	return field
}

func (r *reader) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) uint16() uint16 {
	if b := r.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (r *reader) uint32() uint32 {
	if b := r.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

// varint reads a variable byte integer.
func (r *reader) varint() (v int) {
	for shift := 0; shift < 28; shift += 7 {
		b := r.byte()
		v |= int(b&0x7f) << shift
		if b < 0x80 {
			r.failed = r.failed || shift > 0 && b == 0 // not the shortest form
			return v
		}
	}
	r.failed = true
	return 0
}

// binary reads a field that follows its length.
func (r *reader) binary() []byte { return r.take(int(r.uint16())) }

// text reads a UTF-8 string.
func (r *reader) text() []byte {
	b := r.binary()
	for _, c := range b {
		r.failed = r.failed || c == 0
	}
	r.failed = r.failed || !utf8.Valid(b)
	return b
}

// property is the identifier of a property.
type property byte

// Properties of MQTT 5.0.
const (
	payloadFormat   property = 1
	messageExpiry   property = 2
	contentType     property = 3
	responseTopic   property = 8
	correlationData property = 9
	subscriptionID  property = 11
	sessionExpiry   property = 17
	assignedClient  property = 18
	serverKeepAlive property = 19
	authMethod      property = 21
	authData        property = 22
	problemInfo     property = 23
	willDelay       property = 24
	responseInfo    property = 25
	serverReference property = 28
	reasonString    property = 31
	receiveMaximum  property = 33
	aliasMaximum    property = 34
	topicAlias      property = 35
	maximumQoS      property = 36
	retainAvailable property = 37
	userProperty    property = 38
	maximumPacket   property = 39
)

// propertySet has bit 1<<p for each property p.
type propertySet uint64

func setOf(properties ...property) (set propertySet) {
	for _, p := range properties {
		set |= 1 << p
	}
	return set
}

// allowed returns the properties that a client may send in a packet of the given kind. 0 means the
// properties of a will.
func allowed(k kind) propertySet {
	switch k {
	case connect:
		return setOf(sessionExpiry, authMethod, authData, problemInfo, responseInfo, receiveMaximum, aliasMaximum, userProperty, maximumPacket)
	case publish:
		return setOf(payloadFormat, messageExpiry, contentType, responseTopic, correlationData, topicAlias, userProperty)
	case subscribe:
		return setOf(subscriptionID, userProperty)
	case unsubscribe:
		return setOf(userProperty)
	case disconnect:
		return setOf(sessionExpiry, reasonString, userProperty)
	case puback:
		return setOf(reasonString, userProperty)
	}
	return setOf(willDelay, payloadFormat, messageExpiry, contentType, responseTopic, correlationData, userProperty)
}

// maxUserProperties limits the user properties of a packet. They are checked and dropped.
const maxUserProperties = 64

// redirectProperty is the name of the user property by which a client asks for server references.
const redirectProperty = "srtm-redirect"

// properties are the values that the server uses.
type properties struct {
	present         propertySet
	sessionExpiry   uint32 // seconds
	willDelay       uint32 // seconds
	maximumPacket   uint32 // bytes
	subscriptionID  uint32
	receiveMaximum  uint16
	alias           uint16
	withoutProblems bool // the client wants no reason strings
	redirect        bool
}

func (p *properties) has(id property) bool { return p.present&(1<<id) != 0 }

// properties reads the properties of a packet.
func (r *reader) properties(k kind) (p properties, err *Error) {
	length := r.varint()
	if length == 0 {
		return p, nil
	}
	fields := reader{rest: r.take(length)}
	users := 0
	for set := allowed(k); len(fields.rest) > 0; {
		id := property(fields.byte())
		switch {
		case id > maximumPacket || set&(1<<id) == 0:
			return p, violation("property %d in the wrong packet", id)
		case p.has(id) && id != userProperty:
			return p, violation("property %d twice", id)
		}
		p.present |= 1 << id
		switch id {
		case payloadFormat:
			if fields.byte() > 1 {
				return p, violation("unknown payload format")
			}
		case problemInfo, responseInfo:
			switch v := fields.byte(); {
			case v > 1:
				return p, violation("property %d is neither 0 nor 1", id)
			case id == problemInfo:
				p.withoutProblems = v == 0
			}
		case messageExpiry:
			fields.uint32()
		case sessionExpiry:
			p.sessionExpiry = fields.uint32()
		case willDelay:
			p.willDelay = fields.uint32()
		case maximumPacket:
			if p.maximumPacket = fields.uint32(); p.maximumPacket == 0 && !fields.failed {
				return p, violation("a maximum packet size of 0")
			}
		case receiveMaximum:
			if p.receiveMaximum = fields.uint16(); p.receiveMaximum == 0 && !fields.failed {
				return p, violation("a receive maximum of 0")
			}
		case aliasMaximum:
			fields.uint16()
		case topicAlias:
			p.alias = fields.uint16()
		case subscriptionID:
			if p.subscriptionID = uint32(fields.varint()); p.subscriptionID == 0 && !fields.failed {
				return p, violation("a subscription identifier of 0")
			}
		case correlationData, authData:
			fields.binary()
		case userProperty:
			if users++; users > maxUserProperties {
				return p, &Error{Reason: QuotaExceeded, Text: "more than 64 user properties"}
			}
			name, value := fields.text(), fields.text()
			p.redirect = p.redirect || string(name) == redirectProperty && string(value) == "1"
		default:
			fields.text()
		}
	}
	r.failed = r.failed || fields.failed
	return p, nil
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

func appendLength(dst []byte, v int) []byte {
	for ; v >= 0x80; v >>= 7 {
		dst = append(dst, byte(v)|0x80)
	}
	return append(dst, byte(v))
}

func appendText[T ~string | ~[]byte](dst []byte, text T) []byte {
	return append(binary.BigEndian.AppendUint16(dst, uint16(len(text))), text...)
}

// maxReasonText limits the reason strings that the server sends, in bytes.
const maxReasonText = 200

// appendReason appends properties: the text as reason string, and the server reference. It appends no
// text if the client does not want texts.
func (s *Session) appendReason(dst []byte, text, reference string) []byte {
	return appendSized(dst, func(dst []byte) []byte {
		if reference != "" {
			dst = appendText(append(dst, byte(serverReference)), reference)
		}
		if text = text[:min(len(text), maxReasonText)]; text != "" && !s.terse && utf8.ValidString(text) {
			dst = appendText(append(dst, byte(reasonString)), text)
		}
		return dst
	})
}

// appendPacket appends a packet of the given kind, whose fields append adds.
func appendPacket(dst []byte, k kind, fields func(dst []byte) []byte) []byte {
	return appendSized(append(dst, byte(k)<<4), fields)
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
func misfit(k kind) *Error { return malformed("the fields of %v do not fit its remaining length", k) }

func malformed(format string, args ...any) *Error {
	return &Error{Reason: Malformed, Text: fmt.Sprintf(format, args...)}
}

func violation(format string, args ...any) *Error {
	return &Error{Reason: ProtocolError, Text: fmt.Sprintf(format, args...)}
}
