package session

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/srtm-io/srtm/mqtt/names"
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

func (r *reader) take(size int) []byte {
	if size > len(r.rest) {
		r.rest, r.failed = nil, true
		return nil
	}
	field := r.rest[:size:size]
	r.rest = r.rest[size:]
	return field
}

// number reads an integer of size bytes.
func (r *reader) number(size int) (v uint32) {
	for _, b := range r.take(size) {
		v = v<<8 | uint32(b)
	}
	return v
}

func (r *reader) byte() byte     { return byte(r.number(1)) }
func (r *reader) uint16() uint16 { return uint16(r.number(2)) }

// varint reads a variable byte integer, which has the shortest form.
func (r *reader) varint() (v uint32) {
	for shift := 0; shift < 28; shift += 7 {
		b := r.byte()
		v |= uint32(b&0x7f) << shift
		if b < 0x80 {
			r.failed = r.failed || shift > 0 && b == 0
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
	r.failed = r.failed || !utf8.Valid(b) || bytes.IndexByte(b, 0) >= 0
	return b
}

// property is the identifier of a property.
type property byte

// Properties of MQTT 5.0 that the server uses.
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

// form returns how a property of a client is encoded: an integer of 1, 2 or 4 bytes, a variable byte
// integer, text, binary data, or a pair of texts.
func (p property) form() byte { return "-14t----tb-v-----4---tb141-----t-222--p4"[p] }

// propertySet has bit 1<<p for each property p.
type propertySet uint64

func setOf(properties ...property) (set propertySet) {
	for _, p := range properties {
		set |= 1 << p
	}
	return set
}

func (set propertySet) has(p property) bool { return set&(1<<p) != 0 }

// allowed returns the properties that a client may send in a packet of the given kind. 0 means the
// properties of a will.
func allowed(k kind) propertySet {
	message := forReceivers()
	switch k {
	case connect:
		return setOf(sessionExpiry, authMethod, authData, problemInfo, responseInfo, receiveMaximum, aliasMaximum, userProperty, maximumPacket)
	case publish:
		return message | setOf(topicAlias)
	case subscribe:
		return setOf(subscriptionID, userProperty)
	case unsubscribe:
		return setOf(userProperty)
	case disconnect:
		return setOf(sessionExpiry, reasonString, userProperty)
	case puback:
		return setOf(reasonString, userProperty)
	}
	return message | setOf(willDelay)
}

// forReceivers returns the properties of a message that the server forwards to receivers.
func forReceivers() propertySet {
	return setOf(payloadFormat, messageExpiry, contentType, responseTopic, correlationData, userProperty)
}

// maxUserProperties limits the user properties of a packet.
const maxUserProperties = 64

// redirectProperty is the name of the user property by which a client asks for server references.
const redirectProperty = "srtm-redirect"

// properties are the properties of a packet.
type properties struct {
	propertySet
	values   [maximumPacket + 1]uint32 // of integers
	redirect bool

	// arena[start:] has the properties for receivers, as in an attribute. Its owner sets both.
	arena []byte
	start int
}

// properties reads the properties of a packet.
func (r *reader) properties(k kind, p *properties) *Error {
	fields := reader{rest: r.take(int(r.varint()))}
	users := 0
	for set := allowed(k); len(fields.rest) > 0; {
		field := fields.rest
		id := property(fields.byte())
		switch {
		case id > maximumPacket || !set.has(id):
			return violation("property %d in %v", id, k)
		case p.has(id) && id != userProperty:
			return violation("property %d twice", id)
		}
		p.propertySet |= 1 << id
		value := &p.values[id]
		switch form := id.form(); form {
		case '1', '2', '4':
			*value = fields.number(int(form - '0'))
		case 'v':
			*value = fields.varint()
		case 't':
			fields.text()
		case 'b':
			fields.binary()
		case 'p':
			if users++; users > maxUserProperties {
				return &Error{Reason: QuotaExceeded, Text: "more than 64 user properties"}
			}
			name, text := fields.text(), fields.text()
			p.redirect = p.redirect || string(name) == redirectProperty && string(text) == "1"
		}
		switch {
		case fields.failed:
		case id.form() == '1' && *value > 1, *value == 0 && setOf(maximumPacket, receiveMaximum, subscriptionID).has(id):
			return violation("property %d with the value %d", id, *value)
		case id == messageExpiry:
			p.arena = slices.Insert(p.arena, p.start, field[:5]...)
		case forReceivers().has(id) && len(p.arena)-p.start <= names.MaxAttribute:
			p.arena = append(p.arena, field[:len(field)-len(fields.rest)]...)
		}
	}
	r.failed = r.failed || fields.failed
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
