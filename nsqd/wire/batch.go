package wire

import (
	"encoding/binary"
	"fmt"
)

// Batch is the body of an MPUB: one or more messages, checked as a whole when
// it was parsed. It is a view into the parsed buffer, like Command's slices.
// The zero Batch is empty.
//
// Invariant: body is exactly n messages, each with its size before it and none
// empty.
type Batch struct {
	body []byte
	n    int
}

// Len returns how many messages b holds.
func (b Batch) Len() int { return b.n }

// Bytes returns the sum of the messages' sizes.
func (b Batch) Bytes() int { return len(b.body) - b.n*sizeLength }

// Each calls f with every message, in order. Allocates nothing.
func (b Batch) Each(f func(body []byte)) {
	for rest := b.body; len(rest) > 0; {
		end := sizeLength + int(binary.BigEndian.Uint32(rest))
		f(rest[sizeLength:end:end])
		rest = rest[end:]
	}
}

// parseBatch takes the body of an MPUB:
//
//	[x][x][x][x] [x][x][x][x] [x][x][x][x] | ...      | [x][x][x][x] | ...
//	|  (uint32) ||  (uint32) ||  (uint32)  || N1 bytes ||  (uint32)  || N2 bytes
//	  body size    messages M    size N1      message 1   size N2       message 2
//
// Every count and size is checked, and that they add up, before one message of
// it is used: MPUB is all or nothing.
func (c *Command) parseBatch(in []byte, at int, lim *Limits) (n, need int, fault *Error) {
	if fault = badTopic(c.Verb, c.Topic); fault != nil {
		return 0, 0, fault
	}
	body, n, need, fault := parseBody(in, at, lim.MaxBodySize, c.Verb, CodeBadBody)
	if fault != nil || n == 0 {
		return 0, need, fault
	}
	if c.Batch, fault = newBatch(body, lim.MaxMessageSize); fault != nil {
		return 0, 0, fault
	}
	return n, 0, nil
}

// ParseBatch reads the body of an MPUB, from its message count on, that came
// by another way, such as HTTP. The Batch is a view into body; the error is an
// *Error.
func ParseBatch(body []byte, maxMessage int) (Batch, error) {
	b, fault := newBatch(body, maxMessage)
	if fault != nil {
		return Batch{}, fault
	}
	return b, nil
}

func newBatch(body []byte, maxMessage int) (Batch, *Error) {
	if len(body) < sizeLength {
		return Batch{}, NewError(CodeBadBody, fmt.Sprintf("MPUB body of %d bytes has no message count", len(body)))
	}
	count := binary.BigEndian.Uint32(body)
	body = body[sizeLength:]
	// A message takes 4 bytes or more, so the count is bounded by the body
	// before anyone could size something by it. (It takes 5: one of size 0 is
	// refused below, for what it is.)
	if most := len(body) / sizeLength; count == 0 || int64(count) > int64(most) {
		return Batch{}, NewError(CodeBadBody, fmt.Sprintf("MPUB message count %d is outside [1, %d] for its body", count, most))
	}
	rest := body
	for i := range count {
		if len(rest) < sizeLength {
			return Batch{}, NewError(CodeBadBody, fmt.Sprintf("MPUB body ends before message %d of %d", i+1, count))
		}
		size := binary.BigEndian.Uint32(rest)
		rest = rest[sizeLength:]
		if size == 0 || int64(size) > int64(maxMessage) {
			return Batch{}, NewError(CodeBadMessage, fmt.Sprintf("MPUB message %d of %d bytes is outside [1, %d]", i+1, size, maxMessage))
		}
		if int64(size) > int64(len(rest)) {
			return Batch{}, NewError(CodeBadBody, fmt.Sprintf("MPUB message %d of %d bytes passes the end of the body", i+1, size))
		}
		rest = rest[size:]
	}
	if len(rest) > 0 {
		return Batch{}, NewError(CodeBadBody, fmt.Sprintf("MPUB body has %d bytes after its last message", len(rest)))
	}
	return Batch{body: body, n: int(count)}, nil
}
