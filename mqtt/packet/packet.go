// Package packet encodes and parses the MQTT packets of a device: it publishes with quality of
// service 1, and receives a subscription. Emulated devices, load generators and tests use the
// package. A function with a version argument takes V311 or V5.
//
// The package must not know sockets. The broker's own side is mqtt/session, which checks all of a
// peer's bytes; package packet checks only the bytes that a device needs.
package packet

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Protocol versions, as CONNECT has them.
const (
	V311 = 4
	V5   = 5
)

// Kinds of packets: the first byte, without the flags of a PUBLISH.
const (
	Connect     = 0x10
	Connack     = 0x20
	Publish     = 0x30
	Puback      = 0x40
	Subscribe   = 0x82
	Suback      = 0x90
	PingRequest = 0xC0
	PingReply   = 0xD0
	Disconnect  = 0xE0
)

// Properties of MQTT 5.0.
const (
	sessionExpiry   = 0x11
	serverReference = 0x1C
	receiveMaximum  = 0x21
	userProperty    = 0x26
)

// Hello is the content of a CONNECT.
type Hello struct {
	Version   byte
	ClientID  string
	KeepAlive uint16 // seconds; 0: none
	Resume    bool   // keep the session of an earlier connection
	Expiry    uint32 // of the session after the connection, in seconds; 5.0
	Redirect  bool   // ask the broker for the address of the device's own broker; 5.0
}

// Append appends one packet of a kind, which body completes.
func Append(dst []byte, kind byte, body []byte) []byte {
	return append(appendHead(dst, kind, len(body)), body...)
}

// appendHead appends a fixed header.
func appendHead(dst []byte, kind byte, n int) []byte {
	dst = append(dst, kind)
	for ; n > 127; n >>= 7 {
		dst = append(dst, byte(n)|128)
	}
	return append(dst, byte(n))
}

func appendText(dst []byte, text string) []byte {
	return append(binary.BigEndian.AppendUint16(dst, uint16(len(text))), text...)
}

// AppendConnect appends a CONNECT.
func AppendConnect(dst []byte, h Hello) []byte {
	flags := byte(2) // clean start
	if h.Resume {
		flags = 0
	}
	body := append(appendText(nil, "MQTT"), h.Version, flags)
	body = binary.BigEndian.AppendUint16(body, h.KeepAlive)
	if h.Version == V5 {
		var properties []byte
		if h.Expiry > 0 {
			properties = binary.BigEndian.AppendUint32(append(properties, sessionExpiry), h.Expiry)
		}
		if h.Redirect {
			properties = appendText(appendText(append(properties, userProperty), "srtm-redirect"), "1")
		}
		body = append(append(body, byte(len(properties))), properties...)
	}
	return Append(dst, Connect, appendText(body, h.ClientID))
}

// AppendPublish appends a PUBLISH with quality of service 1 and packet id id. The body is the end
// of the packet.
func AppendPublish(dst []byte, version byte, topic string, id uint16, body []byte) []byte {
	head := 4 + len(topic)
	if version == V5 {
		head++
	}
	dst = appendText(appendHead(dst, Publish|2, head+len(body)), topic)
	dst = binary.BigEndian.AppendUint16(dst, id)
	if version == V5 {
		dst = append(dst, 0) // no properties
	}
	return append(dst, body...)
}

// AppendSubscribe appends a SUBSCRIBE of one filter with quality of service 1.
func AppendSubscribe(dst []byte, version byte, id uint16, filter string) []byte {
	body := binary.BigEndian.AppendUint16(nil, id)
	if version == V5 {
		body = append(body, 0)
	}
	return Append(dst, Subscribe, append(appendText(body, filter), 1))
}

// AppendPuback appends a PUBACK without a reason, which means success.
func AppendPuback(dst []byte, id uint16) []byte {
	return append(dst, Puback, 2, byte(id>>8), byte(id))
}

// Parse parses the first packet of in. body is a part of in. n is 0 if the packet is incomplete. A
// packet of more than limit bytes is an error.
func Parse(in []byte, limit int) (kind byte, body []byte, n int, err error) {
	size := 0
	for i := 1; i < len(in); i++ {
		if i == 5 {
			return 0, nil, 0, errors.New("mqtt: a length of more than four bytes")
		}
		size |= int(in[i]&127) << (7 * (i - 1))
		if in[i] >= 128 {
			continue
		}
		if n = i + 1 + size; n > limit {
			return 0, nil, 0, fmt.Errorf("mqtt: a packet of %d bytes, the limit is %d", n, limit)
		}
		if len(in) < n {
			return 0, nil, 0, nil
		}
		return in[0], in[i+1 : n], n, nil
	}
	return 0, nil, 0, nil
}

var errShort = errors.New("mqtt: a packet is too short")

// ParseDelivery parses the body of a PUBLISH with quality of service 1.
func ParseDelivery(version byte, body []byte) (topic, payload []byte, id uint16, err error) {
	if len(body) < 2 {
		return nil, nil, 0, errShort
	}
	size := int(binary.BigEndian.Uint16(body))
	if body = body[2:]; len(body) < size+2 {
		return nil, nil, 0, errShort
	}
	topic, id, payload = body[:size], binary.BigEndian.Uint16(body[size:]), body[size+2:]
	if version == V5 {
		if _, payload, err = cutProperties(payload); err != nil {
			return nil, nil, 0, err
		}
	}
	return topic, payload, id, nil
}

// ParsePuback parses the body of a PUBACK. A reason of 0x80 or more is a refusal.
func ParsePuback(body []byte) (id uint16, reason byte, err error) {
	if len(body) < 2 {
		return 0, 0, errShort
	}
	if len(body) > 2 {
		reason = body[2]
	}
	return binary.BigEndian.Uint16(body), reason, nil
}

// Ending is the content of a CONNACK, or of a broker's DISCONNECT.
type Ending struct {
	Reason    byte
	Maximum   int    // messages without a PUBACK that the broker accepts
	Reference string // host:port of the broker to use instead; "": none
}

// Refusal describes a reason that is no success.
func (e Ending) Refusal() error {
	return fmt.Errorf("the broker refused with reason %#02x", e.Reason)
}

// ParseConnack parses the body of a CONNACK.
func ParseConnack(version byte, body []byte) (e Ending, err error) {
	if len(body) < 2 {
		return e, errShort
	}
	e, err = parseEnding(version, body[2:])
	e.Reason = body[1]
	return e, err
}

// ParseDisconnect parses the body of a broker's DISCONNECT of MQTT 5.0.
func ParseDisconnect(body []byte) (e Ending, err error) {
	if len(body) == 0 {
		return e, nil
	}
	e, err = parseEnding(V5, body[1:])
	e.Reason = body[0]
	return e, err
}

func parseEnding(version byte, rest []byte) (e Ending, err error) {
	e.Maximum = 1<<16 - 1
	if version != V5 || len(rest) == 0 {
		return e, nil
	}
	properties, _, err := cutProperties(rest)
	for err == nil && len(properties) > 0 {
		var value []byte
		kind := properties[0]
		if value, properties, err = cutProperty(properties); err != nil {
			break
		}
		switch kind {
		case receiveMaximum:
			e.Maximum = int(binary.BigEndian.Uint16(value))
		case serverReference:
			e.Reference = string(value)
		}
	}
	return e, err
}

// cutProperties returns the properties at the start of in, and the bytes after them.
func cutProperties(in []byte) (properties, rest []byte, err error) {
	size := 0
	for i := 0; i < len(in) && i < 4; i++ {
		size |= int(in[i]&127) << (7 * i)
		if in[i] >= 128 {
			continue
		}
		if len(in) < i+1+size {
			break
		}
		return in[i+1 : i+1+size], in[i+1+size:], nil
	}
	return nil, nil, errShort
}

// cutProperty returns the value of the first property: of a text the text, of a pair its name.
func cutProperty(in []byte) (value, rest []byte, err error) {
	kind, in := in[0], in[1:]
	size := 0
	switch kind {
	case 0x01, 0x17, 0x19, 0x24, 0x25, 0x28, 0x29, 0x2A:
		size = 1
	case 0x13, receiveMaximum, 0x22, 0x23:
		size = 2
	case 0x02, sessionExpiry, 0x18, 0x27:
		size = 4
	case 0x03, 0x08, 0x09, 0x12, 0x15, 0x16, 0x1A, serverReference, 0x1F:
		return cutText(in)
	case userProperty:
		if value, in, err = cutText(in); err == nil {
			_, rest, err = cutText(in)
		}
		return value, rest, err
	default:
		return nil, nil, fmt.Errorf("mqtt: an unknown property %#02x", kind)
	}
	if len(in) < size {
		return nil, nil, errShort
	}
	return in[:size], in[size:], nil
}

func cutText(in []byte) (text, rest []byte, err error) {
	if len(in) < 2 {
		return nil, nil, errShort
	}
	size := int(binary.BigEndian.Uint16(in))
	if in = in[2:]; len(in) < size {
		return nil, nil, errShort
	}
	return in[:size], in[size:], nil
}
