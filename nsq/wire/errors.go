package wire

import (
	"strconv"
	"strings"
	"time"
)

// ErrorCode is the first word of an error frame.
type ErrorCode string

// The protocol's codes. Fatal reports after which codes the server closes.
const (
	CodeInvalid        ErrorCode = "E_INVALID"         // unknown command, invalid arguments, or not allowed now
	CodeBadProtocol    ErrorCode = "E_BAD_PROTOCOL"    // unsupported magic
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
	CodeReqFailed      ErrorCode = "E_REQ_FAILED"      // the message is not in flight to this client
	CodeTouchFailed    ErrorCode = "E_TOUCH_FAILED"    // the message is not in flight to this client
	CodeAuthDisabled   ErrorCode = "E_AUTH_DISABLED"   // AUTH without configured authorization
	CodeAuthFirst      ErrorCode = "E_AUTH_FIRST"      // PUB or SUB before the required AUTH
	CodeAuthFailed     ErrorCode = "E_AUTH_FAILED"     // no auth server could be reached
	CodeUnauthorized   ErrorCode = "E_UNAUTHORIZED"    // the auth server granted nothing

	// CodeRateLimited and CodeQueueFull are SRTM's own. The body was read and dropped, nothing was
	// accepted, and the connection stays open.
	CodeRateLimited ErrorCode = "E_RATE_LIMITED" // the access delay would exceed the topic's limit
	CodeQueueFull   ErrorCode = "E_QUEUE_FULL"   // the topic is full
)

// Fatal reports whether the server closes the connection after this code. Nonfatal are the three
// codes of races between a message's timeout and its acknowledgement, and SRTM's own two codes. All
// other codes, including unknown codes, are fatal.
func (c ErrorCode) Fatal() bool {
	switch c {
	case CodeFinFailed, CodeReqFailed, CodeTouchFailed, CodeRateLimited, CodeQueueFull:
		return false
	}
	return true
}

// Error is a refusal. The code and the text are sent, the cause is not. Fatal means that the
// connection closes.
type Error struct {
	Code  ErrorCode
	Text  string
	Fatal bool
	Cause error
}

// NewError returns an error that is fatal according to its code.
func NewError(code ErrorCode, text string) *Error {
	return &Error{Code: code, Text: text, Fatal: code.Fatal()}
}

// Wrap is NewError with a cause, which is not sent.
func Wrap(code ErrorCode, text string, cause error) *Error {
	return &Error{Code: code, Text: text, Fatal: code.Fatal(), Cause: cause}
}

// retryAfter begins the machine-readable part of E_RATE_LIMITED's text.
const retryAfter = "retry_after_ms="

// RateLimited returns E_RATE_LIMITED with a hint when to retry, rounded up to milliseconds. A
// negative hint counts as zero.
func RateLimited(after time.Duration) *Error {
	ms := int64(max(after, 0) / time.Millisecond)
	if time.Duration(ms)*time.Millisecond < after {
		ms++
	}
	return NewError(CodeRateLimited, retryAfter+strconv.FormatInt(ms, 10))
}

// RetryAfter returns the hint of an E_RATE_LIMITED, limited to the range of Duration. It returns
// false for any other error and without a hint.
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

// Error returns the sent text, followed by the cause.
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

// ParseError parses the data of an error frame, for clients. Whether the error is fatal depends on
// its code.
func ParseError(data []byte) *Error {
	code, text, _ := strings.Cut(string(data), " ")
	return NewError(ErrorCode(code), text)
}
