package session

import (
	"errors"
	"fmt"

	"github.com/srtm-io/srtm/mqtt/packet"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Reason is a reason code of MQTT 5.0.
type Reason byte

// Reason codes that the server sends.
const (
	Success            Reason = 0x00
	NoSubscription     Reason = 0x11
	Unspecified        Reason = 0x80
	Malformed          Reason = 0x81
	ProtocolError      Reason = 0x82
	UnsupportedVersion Reason = 0x84
	BadClientID        Reason = 0x85
	BadUserOrPassword  Reason = 0x86
	NotAuthorized      Reason = 0x87
	ServerUnavailable  Reason = 0x88
	ShuttingDown       Reason = 0x8B
	BadAuthMethod      Reason = 0x8C
	KeepAliveTimeout   Reason = 0x8D
	TakenOver          Reason = 0x8E
	BadFilter          Reason = 0x8F
	BadTopicName       Reason = 0x90
	TooManyPublishes   Reason = 0x93 // Receive Maximum exceeded
	BadTopicAlias      Reason = 0x94
	PacketTooLarge     Reason = 0x95
	QuotaExceeded      Reason = 0x97
	RetainUnsupported  Reason = 0x9A
	QoSUnsupported     Reason = 0x9B
	UseAnotherServer   Reason = 0x9C
)

// Error is the refusal of a packet, or the end of a session. The driver may also return an Error from
// an operation.
type Error struct {
	Reason          Reason
	Text            string // for the log; 5.0 clients also get the text
	ServerReference string // HOST:PORT for UseAnotherServer; "": none
	Cause           error  // not sent
}

// Error returns the text, with the reason code.
func (e *Error) Error() string {
	text := fmt.Sprintf("MQTT reason 0x%02X: %s", byte(e.Reason), e.Text)
	if e.Cause != nil {
		text += ": " + e.Cause.Error()
	}
	return text
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// ReasonOf returns the reason code for an error of the driver: the code of an *Error, or the code that
// corresponds to a *wire.Error, otherwise Unspecified. nil is Success.
func ReasonOf(err error) Reason {
	if err == nil {
		return Success
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Reason
	}
	e, ok := errors.AsType[*wire.Error](err)
	if !ok {
		return Unspecified
	}
	switch e.Code {
	case wire.CodeRateLimited, wire.CodeQueueFull:
		return QuotaExceeded
	case wire.CodeBadTopic, wire.CodeBadChannel:
		return BadTopicName
	case wire.CodeUnauthorized, wire.CodeAuthFirst:
		return NotAuthorized
	case wire.CodeAuthFailed:
		return ServerUnavailable
	}
	return Unspecified
}

// errorOf returns err as an *Error.
func errorOf(err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return &Error{Reason: ReasonOf(err), Text: textOf(err), Cause: err}
}

// textOf returns the text for the client: the part of err that is meant for clients.
func textOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Text
	}
	if e, ok := errors.AsType[*wire.Error](err); ok {
		return e.Text
	}
	return ""
}

// valid returns the reason, or the nearest reason that a PUBACK, SUBACK or UNSUBACK may have.
func (r Reason) valid(k packet.Kind) Reason {
	switch {
	case r == QuotaExceeded, r == NotAuthorized, r < Unspecified:
		return r
	case k == packet.Puback && r == BadTopicName:
		return r
	case k != packet.Puback && (r == BadTopicName || r == BadFilter):
		return BadFilter
	}
	return Unspecified
}
