package names

import (
	"crypto/sha256"
	"encoding/binary"
)

// MaxAttribute is the maximum size of a record attribute in bytes.
const MaxAttribute = 255

// Flags of an attribute.
const (
	flagEnvelope   = 1 << iota // the message's body is an envelope made from the payload
	flagOrigin                 // a tag of the publishing client precedes the name
	flagAtMostOnce             // published with QoS 0
	flagProperties             // properties of MQTT 5.0 precede the name
)

// Attribute is the record attribute of a message that an MQTT client has published:
//
//	flags (1 byte) | origin (8 bytes) | length (1 byte), properties | topic name
//
// A flag says whether the origin is present, another flag whether the properties are present.
type Attribute struct {
	Name     []byte // MQTT topic name
	Envelope bool   // the body is a CloudEvents envelope made from the MQTT payload
	// AtMostOnce means that the client has published with QoS 0, so MQTT subscribers get QoS 0.
	AtMostOnce bool
	// Origin is a tag of the publishing client, by which No Local recognises the client's own messages.
	// 0: no tag. Only clients with No Local subscriptions tag their messages.
	Origin uint64
	// Properties of the PUBLISH for its receivers, as in the packet. The message expiry comes first.
	Properties []byte
}

// Fits reports whether the encoded attribute has at most MaxAttribute bytes. Without properties, every name
// of up to MaxName bytes fits.
func (a *Attribute) Fits() bool { return 9+1+len(a.Properties)+len(a.Name) <= MaxAttribute }

// Append appends the encoded attribute. Requires: len(a.Name) <= MaxName, and Fits if there are properties.
func (a Attribute) Append(dst []byte) []byte {
	flags := byte(0)
	if a.Envelope {
		flags |= flagEnvelope
	}
	if a.AtMostOnce {
		flags |= flagAtMostOnce
	}
	if len(a.Properties) > 0 {
		flags |= flagProperties
	}
	if a.Origin != 0 {
		dst = append(dst, flags|flagOrigin)
		dst = binary.BigEndian.AppendUint64(dst, a.Origin)
	} else {
		dst = append(dst, flags)
	}
	if len(a.Properties) > 0 {
		dst = append(dst, byte(len(a.Properties)))
		dst = append(dst, a.Properties...)
	}
	return append(dst, a.Name...)
}

// ParseAttribute decodes an attribute. Attributes without a name, and attributes of later versions, are
// not ok. Name refers to encoded.
func ParseAttribute(encoded []byte) (a Attribute, ok bool) {
	if len(encoded) == 0 {
		return Attribute{}, false
	}
	flags, rest := encoded[0], encoded[1:]
	if flags&flagOrigin != 0 {
		if len(rest) < 8 {
			return Attribute{}, false
		}
		a.Origin, rest = binary.BigEndian.Uint64(rest), rest[8:]
	}
	if flags&flagProperties != 0 {
		if len(rest) == 0 || len(rest)-1 < int(rest[0]) {
			return Attribute{}, false
		}
		a.Properties, rest = rest[1:1+rest[0]], rest[1+rest[0]:]
	}
	a.Name, a.Envelope, a.AtMostOnce = rest, flags&flagEnvelope != 0, flags&flagAtMostOnce != 0
	if flags&^(flagEnvelope|flagOrigin|flagAtMostOnce|flagProperties) != 0 || len(rest) == 0 || len(rest) > MaxName {
		return Attribute{}, false
	}
	return a, true
}

// OriginOf returns the tag of a client, which is not 0.
func OriginOf(clientID string) uint64 {
	sum := sha256.Sum256([]byte(clientID))
	return binary.BigEndian.Uint64(sum[:]) | 1
}
