package client

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrUnanswered: the publish was sent, and no answer came. It may have been
	// accepted, or not.
	ErrUnanswered = errors.New("sent but not answered")
	// ErrClosed: the publisher or the client was closed before the publish was
	// sent.
	ErrClosed = errors.New("publisher is closed")
	// ErrNotCreated: the loaddistributor does not create the topic, since there are as many
	// topics as there may be, or since no brokers have room for it.
	ErrNotCreated = errors.New("topic is not created")
	// ErrUnknown: the loaddistributor does not know the topic, or not this
	// publisher of it.
	ErrUnknown = errors.New("topic or publisher is unknown")
)

// RefusedError is a broker's answer to a publish other than OK. The message was
// not accepted, and is not sent again by this package.
type RefusedError struct {
	// Code is the protocol's, such as E_RATE_LIMITED.
	Code string
	// Text is what followed it, for people.
	Text string
}

func (e *RefusedError) Error() string {
	return strings.TrimSpace(fmt.Sprintf("broker refused: %s %s", e.Code, e.Text))
}

func refused(data []byte) *RefusedError {
	code, text, _ := strings.Cut(string(data), " ")
	return &RefusedError{Code: code, Text: text}
}
