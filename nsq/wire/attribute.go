package wire

import (
	"encoding/binary"
	"fmt"
)

// MaxAttribute is the maximum length of a message's attribute, in bytes. An attribute travels with
// a message through the brokers, and means nothing to them.
const MaxAttribute = 255

// prefixSize is the maximum length of an attribute with its length.
const prefixSize = 1 + MaxAttribute

// AppendAttribute appends an attribute with its length. Between brokers that agreed on attributes
// (see nsq/origin), the body of each message begins with its attribute:
//
//	[x] | ...     | ...
//	(u8)| N bytes |
//	 N  attribute  payload
func AppendAttribute(dst, attribute []byte) []byte {
	return append(append(dst, byte(len(attribute))), attribute...)
}

// CutAttribute splits a body that begins with its attribute. It returns false if the body is
// shorter than its attribute. The results are views into body.
func CutAttribute(body []byte) (attribute, payload []byte, ok bool) {
	if len(body) == 0 || len(body) < 1+int(body[0]) {
		return nil, nil, false
	}
	n := 1 + int(body[0])
	return body[1:n:n], body[n:], true
}

// AppendAttributed is AppendMessage for a message whose body begins with its attribute.
func AppendAttributed(dst []byte, m *Message, attribute []byte) []byte {
	start := len(dst)
	dst = AppendMessage(dst, m.Timestamp, m.Attempts, m.ID, nil)
	dst = append(AppendAttribute(dst, attribute), m.Body...)
	binary.BigEndian.PutUint32(dst[start:], uint32(len(dst)-start-sizeLength))
	return dst
}

// maxBody returns the maximum size of a message's body.
func (l *Limits) maxBody() int {
	if l.Attributes {
		return l.MaxMessageSize + prefixSize
	}
	return l.MaxMessageSize
}

// checkAttribute refuses a body that is shorter than its attribute, or whose payload is too large.
func (l *Limits) checkAttribute(v Verb, body []byte) *Error {
	if !l.Attributes {
		return nil
	}
	_, payload, ok := CutAttribute(body)
	switch {
	case !ok:
		return NewError(CodeBadMessage, fmt.Sprintf("%s body of %d bytes is shorter than its attribute of 1+%d bytes", v, len(body), body[0]))
	case len(payload) > l.MaxMessageSize:
		return NewError(CodeBadMessage, fmt.Sprintf("%s message of %d bytes beside its attribute is larger than %d", v, len(payload), l.MaxMessageSize))
	}
	return nil
}
