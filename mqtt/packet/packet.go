// Package packet encodes and parses the packets of MQTT 3.1.1 and 5.0: the fields and properties of all
// packets, for the broker's own side (mqtt/session), and the packets of a device. The device publishes with
// quality of service 1, and receives a subscription. Emulated devices, load generators and tests are devices.
// A function with a version argument takes V311 or V5.
//
// The package must not know sockets. mqtt/session checks all of a peer's bytes; the functions for devices
// check only the bytes that a device needs.
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

// RedirectProperty is the name of the user property by which a client requests server references.
const RedirectProperty = "srtm-redirect"

// Hello is the content of a CONNECT.
type Hello struct {
	Version   byte
	ClientID  string
	KeepAlive uint16 // seconds; 0: none
	Resume    bool   // keep the session of an earlier connection
	Expiry    uint32 // of the session after the connection, in seconds; 5.0
	Redirect  bool   // request the address of the device's own broker; 5.0
}

// AppendConnect appends a CONNECT.
func AppendConnect(dst []byte, h Hello) []byte {
	flags := byte(2) // clean start
	if h.Resume {
		flags = 0
	}
	body := append(AppendText(nil, "MQTT"), h.Version, flags)
	body = binary.BigEndian.AppendUint16(body, h.KeepAlive)
	if h.Version == V5 {
		var properties []byte
		if h.Expiry > 0 {
			properties = binary.BigEndian.AppendUint32(append(properties, byte(SessionExpiry)), h.Expiry)
		}
		if h.Redirect {
			properties = AppendText(AppendText(append(properties, byte(UserProperty)), RedirectProperty), "1")
		}
		body = append(append(body, byte(len(properties))), properties...)
	}
	return Append(dst, Connect, AppendText(body, h.ClientID))
}

// AppendPublish appends a PUBLISH with quality of service 1 and packet id id. The body is the end
// of the packet.
func AppendPublish(dst []byte, version byte, topic string, id uint16, body []byte) []byte {
	head := 4 + len(topic)
	if version == V5 {
		head++
	}
	dst = AppendText(AppendLength(append(dst, byte(Publish|2)), head+len(body)), topic)
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
	return Append(dst, Subscribe, append(AppendText(body, filter), 1))
}

// AppendPuback appends a PUBACK without a reason, which means success.
func AppendPuback(dst []byte, id uint16) []byte {
	return append(dst, byte(Puback), 2, byte(id>>8), byte(id))
}

// Parse parses the first packet of in. kind has the flags of a PUBLISH. body is a part of in. n is 0 if
// the packet is incomplete. A packet of more than limit bytes is an error.
func Parse(in []byte, limit int) (kind Kind, body []byte, n int, err error) {
	n, header, err := Header(in)
	switch {
	case err != nil:
		return 0, nil, 0, fmt.Errorf("mqtt: %w", err)
	case n > limit:
		return 0, nil, 0, fmt.Errorf("mqtt: a packet of %d bytes, the limit is %d", n, limit)
	case n == 0, len(in) < n:
		return 0, nil, 0, nil
	}
	return Kind(in[0]), in[header:n], n, nil
}

func (r *Reader) err() error {
	if r.Failed {
		return errors.New("mqtt: a packet is too short, or has an unknown property")
	}
	return nil
}

// ParseDelivery parses the body of a PUBLISH with quality of service 1.
func ParseDelivery(version byte, body []byte) (topic, payload []byte, id uint16, err error) {
	r := Reader{Rest: body}
	topic, id = r.Binary(), r.Uint16()
	if version == V5 {
		r.Properties()
	}
	return topic, r.Rest, id, r.err()
}

// ParsePuback parses the body of a PUBACK. A reason of 0x80 or more is a refusal.
func ParsePuback(body []byte) (id uint16, reason byte, err error) {
	r := Reader{Rest: body}
	if id = r.Uint16(); len(r.Rest) > 0 {
		reason = r.Byte()
	}
	return id, reason, r.err()
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
func ParseConnack(version byte, body []byte) (Ending, error) {
	r := Reader{Rest: body}
	r.Byte() // session present
	return r.ending(version)
}

// ParseDisconnect parses the body of a broker's DISCONNECT of MQTT 5.0.
func ParseDisconnect(body []byte) (e Ending, err error) {
	if len(body) == 0 {
		return e, nil
	}
	return (&Reader{Rest: body}).ending(V5)
}

// ending reads a reason and its properties.
func (r *Reader) ending(version byte) (Ending, error) {
	e := Ending{Reason: r.Byte(), Maximum: 1<<16 - 1}
	if version == V5 && len(r.Rest) > 0 {
		fields := r.Properties()
		for len(fields.Rest) > 0 {
			switch id, number, text, _ := fields.Property(); id {
			case ReceiveMaximum:
				e.Maximum = int(number)
			case ServerReference:
				e.Reference = string(text)
			}
		}
		r.Failed = r.Failed || fields.Failed
	}
	return e, r.err()
}
