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

// Walk is how far the messages of an MPUB that has not come whole were checked,
// so that none is gone through twice however it comes. The zero Walk is that of a
// command of which nothing was seen.
type Walk struct {
	n   uint32 // messages checked
	end uint32 // bytes of the body up to the end of the last of them
}

// parseBatch takes the body of an MPUB:
//
//	[x][x][x][x] [x][x][x][x] [x][x][x][x] | ...      | [x][x][x][x] | ...
//	|  (uint32) ||  (uint32) ||  (uint32)  || N1 bytes ||  (uint32)  || N2 bytes
//	  body size    messages M    size N1      message 1   size N2       message 2
//
// The body ends where its last message does: client libraries send body sizes
// that do not count all of it, and NSQ looks at that size for no more than
// whether it is in [1, MaxBodySize]. Unlike NSQ's, the messages with their count
// and sizes are held to MaxBodySize too.
//
// Every count and size is checked before one message of it is used: MPUB is all
// or nothing.
func (c *Command) parseBatch(in []byte, at int, lim *Limits, seen *Walk) (n, need int, fault *Error) {
	if fault = badTopic(c.Verb, c.Topic); fault != nil {
		return 0, 0, fault
	}
	start := at + sizeLength
	if _, need, fault = parseSize(in, at, lim.MaxBodySize, c.Verb, CodeBadBody); fault != nil || need > 0 {
		return 0, need, fault
	}
	if c.Batch, need, fault = seen.batch(in[start:], lim); fault != nil || need > 0 {
		return 0, start + need, fault
	}
	return start + sizeLength + len(c.Batch.body), 0, nil
}

// ParseBatch reads the body of an MPUB, from its message count on, that came
// by another way, such as HTTP. What follows its last message is passed over, as
// NSQ does. The Batch is a view into body; the error is an *Error.
func ParseBatch(body []byte, lim Limits) (Batch, error) {
	var seen Walk
	b, need, fault := seen.batch(body, &lim)
	switch {
	case fault != nil:
		return Batch{}, fault
	case len(body) < sizeLength:
		return Batch{}, NewError(CodeBadBody, fmt.Sprintf("MPUB body of %d bytes has no message count", len(body)))
	case need > 0:
		return Batch{}, NewError(CodeBadMessage, fmt.Sprintf("MPUB body of %d bytes ends before its %d messages do", len(body), binary.BigEndian.Uint32(body)))
	}
	return b, nil
}

// batch goes on through the messages at the start of body, which begins with
// their count. With less than all of them, need is how many bytes of it are
// needed to get further.
func (w *Walk) batch(body []byte, lim *Limits) (b Batch, need int, fault *Error) {
	if len(body) < sizeLength {
		return Batch{}, sizeLength, nil
	}
	// A message takes 5 bytes or more, so the count is bounded before a caller
	// could size something by it.
	const minimum = sizeLength + 1
	count := binary.BigEndian.Uint32(body)
	if most := (lim.MaxBodySize - sizeLength) / minimum; count == 0 || int64(count) > int64(most) {
		return Batch{}, 0, NewError(CodeBadBody, fmt.Sprintf("MPUB message count %d is outside [1, %d]", count, most))
	}
	left, end := int(count-w.n), max(int(w.end), sizeLength)
	for ; left > 0; left-- {
		// Only the sizes of those that are left: one of size 0 is refused for what it is.
		if need = end + left*sizeLength; len(body) < need {
			break
		}
		size := binary.BigEndian.Uint32(body[end:])
		if size == 0 || int64(size) > int64(lim.MaxMessageSize) {
			return Batch{}, 0, NewError(CodeBadMessage, fmt.Sprintf("MPUB message %d of %d bytes is outside [1, %d]", int(count)-left+1, size, lim.MaxMessageSize))
		}
		// Invariant: end + left*minimum <= MaxBodySize. So this does not overflow.
		if room := lim.MaxBodySize - end - left*minimum + 1; int64(size) > int64(room) {
			return Batch{}, 0, NewError(CodeBadBody, fmt.Sprintf("MPUB of %d messages has more than %d bytes with message %d", count, lim.MaxBodySize, int(count)-left+1))
		}
		end += sizeLength + int(size)
	}
	w.n, w.end = count-uint32(left), uint32(end)
	if need = end + left*sizeLength; len(body) < need {
		return Batch{}, need, nil
	}
	return Batch{body: body[sizeLength:end:end], n: int(count)}, 0, nil
}
