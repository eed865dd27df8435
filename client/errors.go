package client

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrUnanswered: the publish was sent but not answered. The message may have been
	// accepted.
	ErrUnanswered = errors.New("sent but not answered")
	// ErrClosed: the publisher or the client was closed before the publish was sent.
	ErrClosed = errors.New("publisher is closed")
	// ErrNotCreated: the loaddistributor refuses to create the topic, because of a limit of
	// topics, or because no brokers have room for the topic.
	ErrNotCreated = errors.New("topic is not created")
	// ErrUnknown: the loaddistributor does not know the topic, or the publisher in the
	// topic.
	ErrUnknown = errors.New("topic or publisher is unknown")
)

// RefusedError is a broker's answer to a publish other than OK. The message was not
// accepted, and this package does not send it again.
type RefusedError struct {
	// Code is the error code of the protocol, such as E_RATE_LIMITED.
	Code string
	// Text is the text after the code, for people.
	Text string
}

func (e *RefusedError) Error() string {
	return strings.TrimSpace(fmt.Sprintf("broker refused: %s %s", e.Code, e.Text))
}

func refused(data []byte) *RefusedError {
	code, text, _ := strings.Cut(string(data), " ")
	return &RefusedError{Code: code, Text: text}
}
