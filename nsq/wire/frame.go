package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// FrameType is the type of a server's frame.
type FrameType int32

// The frame types of V2.
const (
	FrameResponse FrameType = 0 // a reply or a heartbeat, as text or JSON
	FrameError    FrameType = 1 // "E_CODE text"
	FrameMessage  FrameType = 2 // a message
)

// String returns the type's name.
func (t FrameType) String() string {
	switch t {
	case FrameResponse:
		return "response"
	case FrameError:
		return "error"
	case FrameMessage:
		return "message"
	}
	return fmt.Sprintf("frame type %d", int32(t))
}

// Texts of responses.
const (
	OK        = "OK"
	CloseWait = "CLOSE_WAIT"
	Heartbeat = "_heartbeat_"
)

const (
	frameTypeLength = 4
	// FrameOverhead is the size of a frame without its data, in bytes.
	FrameOverhead = sizeLength + frameTypeLength
	// messageHeader is the size of a message's data before its body, in bytes.
	messageHeader = 8 + 2 + len(MessageID{})
	// MessageOverhead is the size of a message frame without the body, in bytes.
	MessageOverhead = FrameOverhead + messageHeader
)

// ErrFrame and ErrMessage report malformed data from a server. After either error the client must
// close.
var (
	ErrFrame   = errors.New("malformed frame")
	ErrMessage = errors.New("malformed message")
)

// appendFrameHeader appends the header of a frame with n bytes of data:
//
//	[x][x][x][x] [x][x][x][x] | ...
//	|  (uint32) ||  (int32)  ||  N bytes
//	    N + 4     frame type     data
func appendFrameHeader(dst []byte, t FrameType, n int) []byte {
	dst = binary.BigEndian.AppendUint32(dst, uint32(frameTypeLength+n))
	return binary.BigEndian.AppendUint32(dst, uint32(t))
}

// AppendResponse appends a response frame with the text s.
func AppendResponse[T ~string | ~[]byte](dst []byte, s T) []byte {
	return append(appendFrameHeader(dst, FrameResponse, len(s)), s...)
}

// AppendError appends an error frame with e's code and text, without the cause.
//
//	[size uint32][00 00 00 01] E _ C O D E ' ' text
func AppendError(dst []byte, e *Error) []byte {
	n := len(e.Code)
	if e.Text != "" {
		n += 1 + len(e.Text)
	}
	dst = append(appendFrameHeader(dst, FrameError, n), e.Code...)
	if e.Text != "" {
		dst = append(append(dst, ' '), e.Text...)
	}
	return dst
}

// MessageFrameSize returns the length of a message frame with a body of n bytes.
func MessageFrameSize(n int) int { return MessageOverhead + n }

// AppendMessage appends a message frame. timestamp is the wall clock in nanoseconds when the
// message was accepted. attempts includes this delivery.
//
//	[x][x][x][x] [x][x][x][x] [x][x][x][x][x][x][x][x] [x][x] [x]..16..[x] | ...
//	|  (uint32) ||  (int32)  ||       (int64)        ||(u16)||   (ASCII)  || N bytes
//	   N + 30      type = 2         nanoseconds       attempts  message id    body
func AppendMessage(dst []byte, timestamp int64, attempts uint16, id MessageID, body []byte) []byte {
	dst = appendFrameHeader(dst, FrameMessage, messageHeader+len(body))
	dst = binary.BigEndian.AppendUint64(dst, uint64(timestamp))
	dst = binary.BigEndian.AppendUint16(dst, attempts)
	return append(append(dst, id[:]...), body...)
}

// ParseFrame parses the frame at the start of in, in place, for clients. data is a view into in. n
// is the frame's length, or 0 if the frame is incomplete (see FrameSize). ParseFrame returns
// ErrFrame as early as possible if the data is longer than limit bytes, the frame is too short for
// a type, or the type is unknown.
func ParseFrame(in []byte, limit int) (t FrameType, data []byte, n int, err error) {
	size, err := FrameSize(in, limit)
	if err != nil || size == 0 {
		return 0, nil, 0, err
	}
	if len(in) < FrameOverhead {
		return 0, nil, 0, nil
	}
	kind := binary.BigEndian.Uint32(in[sizeLength:])
	if kind > uint32(FrameMessage) {
		return 0, nil, 0, fmt.Errorf("%w: type %d", ErrFrame, int32(kind))
	}
	if len(in) < size {
		return 0, nil, 0, nil
	}
	return FrameType(kind), in[FrameOverhead:size:size], size, nil
}

// FrameSize returns the length of the frame at the start of in, 0 if the size is incomplete, or
// ErrFrame as ParseFrame does.
func FrameSize(in []byte, limit int) (int, error) {
	if len(in) < sizeLength {
		return 0, nil
	}
	size := binary.BigEndian.Uint32(in)
	if size < frameTypeLength || size > math.MaxInt32-sizeLength || int(size)-frameTypeLength > limit {
		return 0, fmt.Errorf("%w: size %d is outside [%d, %d]", ErrFrame, size, frameTypeLength, limit+frameTypeLength)
	}
	return sizeLength + int(size), nil
}

// Message is a delivered message. Body is a view into the frame's data.
type Message struct {
	Timestamp int64 // wall clock in nanoseconds when the message was accepted
	Attempts  uint16
	ID        MessageID
	Body      []byte
}

// ParseMessage parses the data of a message frame, or returns ErrMessage.
func ParseMessage(data []byte) (Message, error) {
	if len(data) < messageHeader {
		return Message{}, fmt.Errorf("%w: %d bytes are less than its header of %d", ErrMessage, len(data), messageHeader)
	}
	m := Message{
		Timestamp: int64(binary.BigEndian.Uint64(data)),
		Attempts:  binary.BigEndian.Uint16(data[8:]),
		Body:      data[messageHeader:],
	}
	copy(m.ID[:], data[10:])
	return m, nil
}
