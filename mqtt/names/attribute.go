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
)

// Attribute is the record attribute of a message that an MQTT client has published:
//
//	flags (1 byte) | origin (8 bytes, if its flag is set) | topic name
type Attribute struct {
	Name     []byte // MQTT topic name
	Envelope bool   // the body is a CloudEvents envelope made from the MQTT payload
	// AtMostOnce means that the client has published with QoS 0, so MQTT subscribers get QoS 0.
	AtMostOnce bool
	// Origin is a tag of the publishing client, by which No Local recognises the client's own messages.
	// 0: no tag. Only clients with No Local subscriptions tag their messages.
	Origin uint64
}

// Append appends the encoded attribute. Requires: len(a.Name) <= MaxName.
func (a Attribute) Append(dst []byte) []byte {
	flags := byte(0)
	if a.Envelope {
		flags |= flagEnvelope
	}
	if a.AtMostOnce {
		flags |= flagAtMostOnce
	}
	if a.Origin != 0 {
		dst = append(dst, flags|flagOrigin)
		dst = binary.BigEndian.AppendUint64(dst, a.Origin)
	} else {
		dst = append(dst, flags)
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
	a.Name, a.Envelope, a.AtMostOnce = rest, flags&flagEnvelope != 0, flags&flagAtMostOnce != 0
	if flags&^(flagEnvelope|flagOrigin|flagAtMostOnce) != 0 || len(rest) == 0 || len(rest) > MaxName {
		return Attribute{}, false
	}
	return a, true
}

// OriginOf returns the tag of a client, which is not 0.
func OriginOf(clientID string) uint64 {
	sum := sha256.Sum256([]byte(clientID))
	return binary.BigEndian.Uint64(sum[:]) | 1
}
