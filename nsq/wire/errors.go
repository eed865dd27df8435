package wire

import (
	"strconv"
	"strings"
	"time"
)

// ErrorCode is the first word of an error frame.
type ErrorCode string

// The codes of the protocol. Fatal says after which of them the server closes.
const (
	CodeInvalid        ErrorCode = "E_INVALID"         // not a command, wrong arguments, or not allowed now
	CodeBadProtocol    ErrorCode = "E_BAD_PROTOCOL"    // the magic is not one we speak
	CodeBadBody        ErrorCode = "E_BAD_BODY"        // size or content of an IDENTIFY, AUTH or MPUB body
	CodeBadTopic       ErrorCode = "E_BAD_TOPIC"       // topic name
	CodeBadChannel     ErrorCode = "E_BAD_CHANNEL"     // channel name
	CodeBadMessage     ErrorCode = "E_BAD_MESSAGE"     // size of a message
	CodePubFailed      ErrorCode = "E_PUB_FAILED"      // PUB could not be carried out
	CodeMpubFailed     ErrorCode = "E_MPUB_FAILED"     // MPUB could not be carried out
	CodeDpubFailed     ErrorCode = "E_DPUB_FAILED"     // DPUB could not be carried out
	CodeSubFailed      ErrorCode = "E_SUB_FAILED"      // SUB could not be carried out
	CodeIdentifyFailed ErrorCode = "E_IDENTIFY_FAILED" // IDENTIFY could not be carried out
	CodeFinFailed      ErrorCode = "E_FIN_FAILED"      // the message is not in flight to this client
	CodeReqFailed      ErrorCode = "E_REQ_FAILED"      // likewise
	CodeTouchFailed    ErrorCode = "E_TOUCH_FAILED"    // likewise
	CodeAuthDisabled   ErrorCode = "E_AUTH_DISABLED"   // AUTH where no authorisation is configured
	CodeAuthFirst      ErrorCode = "E_AUTH_FIRST"      // PUB or SUB before the required AUTH
	CodeAuthFailed     ErrorCode = "E_AUTH_FAILED"     // the auth server could not be asked
	CodeUnauthorized   ErrorCode = "E_UNAUTHORIZED"    // the auth server granted nothing

	// CodeRateLimited and CodeQueueFull are SRTM's own. The body was read and
	// dropped, nothing was accepted, the connection goes on.
	CodeRateLimited ErrorCode = "E_RATE_LIMITED" // the access delay would pass the topic's limit
	CodeQueueFull   ErrorCode = "E_QUEUE_FULL"   // the topic holds as much as it may
)

// Fatal reports whether the server closes the connection after this code. It
// does after every code, unknown ones included, except the three that are
// races of a message's timeout with its acknowledgement, and SRTM's own two.
func (c ErrorCode) Fatal() bool {
	switch c {
	case CodeFinFailed, CodeReqFailed, CodeTouchFailed, CodeRateLimited, CodeQueueFull:
		return false
	}
	return true
}

// Error is a refusal as it goes over the wire: code and text are sent, cause
// stays here. Fatal is the verdict on the connection.
type Error struct {
	Code  ErrorCode
	Text  string
	Fatal bool
	Cause error
}

// NewError returns an error with its code's own verdict.
func NewError(code ErrorCode, text string) *Error {
	return &Error{Code: code, Text: text, Fatal: code.Fatal()}
}

// Wrap is NewError with a cause, which is not sent.
func Wrap(code ErrorCode, text string, cause error) *Error {
	return &Error{Code: code, Text: text, Fatal: code.Fatal(), Cause: cause}
}

// retryAfter opens the machine-readable part of E_RATE_LIMITED's text.
const retryAfter = "retry_after_ms="

// RateLimited returns E_RATE_LIMITED with a hint of when a retry may be
// admitted, rounded up to whole milliseconds; a negative hint counts as zero.
func RateLimited(after time.Duration) *Error {
	ms := int64(max(after, 0) / time.Millisecond)
	if time.Duration(ms)*time.Millisecond < after {
		ms++
	}
	return NewError(CodeRateLimited, retryAfter+strconv.FormatInt(ms, 10))
}

// RetryAfter returns the hint of an E_RATE_LIMITED, cut to what a Duration
// holds, and false for any other error and for one without a hint.
func (e *Error) RetryAfter() (time.Duration, bool) {
	if e.Code != CodeRateLimited {
		return 0, false
	}
	digits, ok := strings.CutPrefix(e.Text, retryAfter)
	if !ok {
		return 0, false
	}
	ms, ok := parseInt(digits)
	if !ok || ms < 0 {
		return 0, false
	}
	return time.Duration(min(ms, int64(maxDuration/time.Millisecond))) * time.Millisecond, true
}

// Error returns what is sent, followed by the cause.
func (e *Error) Error() string {
	s := string(e.Code)
	if e.Text != "" {
		s += " " + e.Text
	}
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// ParseError is the client's side: the data of an error frame as an Error. The
// verdict is the code's own.
func ParseError(data []byte) *Error {
	code, text, _ := strings.Cut(string(data), " ")
	return NewError(ErrorCode(code), text)
}
