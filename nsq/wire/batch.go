package wire

import (
	"encoding/binary"
	"fmt"
)

// Batch is the body of an MPUB: one or more messages, all checked during parsing. It is a view into
// the parsed buffer, like Command's slices. The zero Batch is empty.
//
// Invariant: body consists of exactly n messages, each preceded by its size and not empty.
type Batch struct {
	body []byte
	n    int
}

// Len returns the number of messages.
func (b Batch) Len() int { return b.n }

// Bytes returns the sum of the messages' sizes.
func (b Batch) Bytes() int { return len(b.body) - b.n*sizeLength }

// Each calls f with every message, in order. It allocates nothing.
func (b Batch) Each(f func(body []byte)) {
	for rest := b.body; len(rest) > 0; {
		end := sizeLength + int(binary.BigEndian.Uint32(rest))
		f(rest[sizeLength:end:end])
		rest = rest[end:]
	}
}

// Walk is the progress of checking an incomplete MPUB, so that each message is checked once,
// however the MPUB arrives. The zero Walk has no progress.
type Walk struct {
	n   uint32 // messages checked
	end uint32 // bytes of the body up to the end of the last checked message
}

// parseBatch parses the body of an MPUB:
//
//	[x][x][x][x] [x][x][x][x] [x][x][x][x] | ...      | [x][x][x][x] | ...
//	|  (uint32) ||  (uint32) ||  (uint32)  || N1 bytes ||  (uint32)  || N2 bytes
//	  body size    messages M    size N1      message 1   size N2       message 2
//
// The body ends with its last message. Client libraries send body sizes that are too small, and NSQ
// only checks that the size is in [1, MaxBodySize]. Unlike NSQ, this parser also limits the
// messages with their count and sizes to MaxBodySize.
//
// Every count and size is checked before the first message is used, because MPUB is all or nothing.
func (c *Command) parseBatch(in []byte, at int, lim *Limits, walk *Walk) (n, need int, fault *Error) {
	if fault = badTopic(c.Verb, c.Topic); fault != nil {
		return 0, 0, fault
	}
	start := at + sizeLength
	if _, need, fault = parseSize(in, at, lim.MaxBodySize, c.Verb, CodeBadBody); fault != nil || need > 0 {
		return 0, need, fault
	}
	if c.Batch, need, fault = walk.batch(in[start:], lim); fault != nil || need > 0 {
		return 0, start + need, fault
	}
	if lim.Attributes {
		c.Batch.Each(func(body []byte) {
			if fault == nil {
				fault = lim.checkAttribute(c.Verb, body)
			}
		})
	}
	return start + sizeLength + len(c.Batch.body), 0, fault
}

// ParseBatch parses the body of an MPUB, starting at its message count, from another source such as
// HTTP. As in NSQ, it ignores bytes after the last message. The Batch is a view into body. An error
// is an *Error.
func ParseBatch(body []byte, lim Limits) (Batch, error) {
	var walk Walk
	b, need, fault := walk.batch(body, &lim)
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

// batch continues to check the messages at the start of body, which begins with their count. If
// body is incomplete, need is the number of bytes required to make progress.
func (w *Walk) batch(body []byte, lim *Limits) (b Batch, need int, fault *Error) {
	if len(body) < sizeLength {
		return Batch{}, sizeLength, nil
	}
	// A message takes at least 5 bytes, which limits the count before a caller uses the count as a
	// size.
	const minimum = sizeLength + 1
	count := binary.BigEndian.Uint32(body)
	if maxCount := (lim.MaxBodySize - sizeLength) / minimum; count == 0 || int64(count) > int64(maxCount) {
		return Batch{}, 0, NewError(CodeBadBody, fmt.Sprintf("MPUB message count %d is outside [1, %d]", count, maxCount))
	}
	left, end := int(count-w.n), max(int(w.end), sizeLength)
	for ; left > 0; left-- {
		// Require only the sizes of the remaining messages, so that a size of 0 is refused at once.
		if need = end + left*sizeLength; len(body) < need {
			break
		}
		size := binary.BigEndian.Uint32(body[end:])
		if size == 0 || int64(size) > int64(lim.maxBody()) {
			return Batch{}, 0, NewError(CodeBadMessage, fmt.Sprintf("MPUB message %d of %d bytes is outside [1, %d]", int(count)-left+1, size, lim.maxBody()))
		}
		// Invariant: end + left*minimum <= MaxBodySize. So the subtraction does not overflow.
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
