package packet

import (
	"bytes"
	"encoding/binary"
	"errors"
	"unicode/utf8"
)

// Kind is the type of a packet: its first byte, without the flags of a PUBLISH.
type Kind byte

// Kinds of packets.
const (
	Connect     Kind = 0x10
	Connack     Kind = 0x20
	Publish     Kind = 0x30
	Puback      Kind = 0x40
	Pubrel      Kind = 0x62
	Subscribe   Kind = 0x82
	Suback      Kind = 0x90
	Unsubscribe Kind = 0xA2
	Unsuback    Kind = 0xB0
	PingRequest Kind = 0xC0
	PingReply   Kind = 0xD0
	Disconnect  Kind = 0xE0
)

// KindOf returns the kind of a packet by the upper half of its first byte.
func KindOf(first byte) Kind {
	switch k := Kind(first & 0xF0); k | 2 {
	case Pubrel, Subscribe, Unsubscribe:
		return k | 2
	default:
		return k
	}
}

// String returns the packet's name in the specification.
func (k Kind) String() string {
	return [...]string{
		"packet 0", "CONNECT", "CONNACK", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBSCRIBE",
		"SUBACK", "UNSUBSCRIBE", "UNSUBACK", "PINGREQ", "PINGRESP", "DISCONNECT", "AUTH",
	}[k>>4]
}

// Header returns the size of the packet at the start of in, with the fixed header, and the size of
// the fixed header. If in does not have the whole fixed header, size is 0.
func Header(in []byte) (size, header int, err error) {
	length := 0
	for i := 1; i < len(in); i++ {
		if i == 5 {
			return 0, 0, errors.New("the remaining length has more than 4 bytes")
		}
		length |= int(in[i]&0x7f) << (7 * (i - 1))
		if in[i] < 0x80 {
			if i > 1 && in[i] == 0 {
				return 0, 0, errors.New("the remaining length has more bytes than necessary")
			}
			return 1 + i + length, 1 + i, nil
		}
	}
	return 0, 0, nil
}

// Reader decodes the fields of a packet. The first failure sets Failed and empties Rest, so the next
// reads fail, too. Callers check Failed once, after the last field.
type Reader struct {
	Rest   []byte
	Failed bool
}

func (r *Reader) take(size int) []byte {
	if size > len(r.Rest) {
		r.Rest, r.Failed = nil, true
		return nil
	}
	field := r.Rest[:size:size]
	r.Rest = r.Rest[size:]
	return field
}

// number reads an integer of size bytes.
func (r *Reader) number(size int) (v uint32) {
	for _, b := range r.take(size) {
		v = v<<8 | uint32(b)
	}
	return v
}

// Byte reads a byte.
func (r *Reader) Byte() byte { return byte(r.number(1)) }

// Uint16 reads an integer of two bytes.
func (r *Reader) Uint16() uint16 { return uint16(r.number(2)) }

// varint reads a variable byte integer, which has the shortest form.
func (r *Reader) varint() (v uint32) {
	for shift := 0; shift < 28; shift += 7 {
		b := r.Byte()
		v |= uint32(b&0x7f) << shift
		if b < 0x80 {
			r.Failed = r.Failed || shift > 0 && b == 0
			return v
		}
	}
	r.Failed = true
	return 0
}

// Binary reads a field that follows its length.
func (r *Reader) Binary() []byte { return r.take(int(r.Uint16())) }

// Text reads a UTF-8 string.
func (r *Reader) Text() []byte {
	b := r.Binary()
	r.Failed = r.Failed || !utf8.Valid(b) || bytes.IndexByte(b, 0) >= 0
	return b
}

// Property is the identifier of a property of MQTT 5.0.
type Property byte

// Properties that the programs of SRTM use.
const (
	PayloadFormat   Property = 1
	MessageExpiry   Property = 2
	ContentType     Property = 3
	ResponseTopic   Property = 8
	CorrelationData Property = 9
	SubscriptionID  Property = 11
	SessionExpiry   Property = 17
	AssignedClient  Property = 18
	AuthMethod      Property = 21
	AuthData        Property = 22
	ProblemInfo     Property = 23
	WillDelay       Property = 24
	ResponseInfo    Property = 25
	ServerReference Property = 28
	ReasonString    Property = 31
	ReceiveMaximum  Property = 33
	AliasMaximum    Property = 34
	TopicAlias      Property = 35
	MaximumQoS      Property = 36
	RetainAvailable Property = 37
	UserProperty    Property = 38
	MaximumPacket   Property = 39
)

// forms has the encoding of each property: an integer of 1, 2 or 4 bytes, a variable byte integer, text,
// binary data, or a pair of texts.
const forms = "-14t----tb-v-----4t2-tb141t-t--t-22211p4111"

// Flag reports whether the property is an integer of 1 byte.
func (p Property) Flag() bool { return int(p) < len(forms) && forms[p] == '1' }

// Properties returns a reader of the properties that follow.
func (r *Reader) Properties() Reader { return Reader{Rest: r.take(int(r.varint()))} }

// Property reads a property. number is the value of an integer. text is the value of another property, and
// second is the second text of a pair. An unknown property fails.
func (r *Reader) Property() (id Property, number uint32, text, second []byte) {
	id = Property(r.Byte())
	form := byte('-')
	if int(id) < len(forms) {
		form = forms[id]
	}
	switch form {
	case '1', '2', '4':
		number = r.number(int(form - '0'))
	case 'v':
		number = r.varint()
	case 't':
		text = r.Text()
	case 'b':
		text = r.Binary()
	case 'p':
		text, second = r.Text(), r.Text()
	default:
		r.Rest, r.Failed = nil, true
	}
	return id, number, text, second
}

// Append appends one packet of a kind, which body completes.
func Append(dst []byte, kind Kind, body []byte) []byte {
	return append(AppendLength(append(dst, byte(kind)), len(body)), body...)
}

// AppendLength appends a variable byte integer.
func AppendLength(dst []byte, v int) []byte {
	for ; v >= 0x80; v >>= 7 {
		dst = append(dst, byte(v)|0x80)
	}
	return append(dst, byte(v))
}

// AppendText appends a field after its length.
func AppendText[T ~string | ~[]byte](dst []byte, text T) []byte {
	return append(binary.BigEndian.AppendUint16(dst, uint16(len(text))), text...)
}
