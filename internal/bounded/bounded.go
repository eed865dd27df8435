// Package bounded reads what a peer answers that may be hostile: a gigabyte, or a few bytes that
// are a hundred each when they are decoded. How long it may take is the business of who asks.
package bounded

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Read returns all of an answer, unless that is more than so many bytes.
func Read(body io.Reader, most int64) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(body, most+1))
	if err == nil && int64(len(text)) > most {
		return nil, fmt.Errorf("answers with more than %d bytes", most)
	}
	return text, err
}

// MaxElements is what Decode should take at most where nothing is known of the answer.
const MaxElements = 1 << 16

// ErrElements: an answer would take far more memory than its text.
var ErrElements = errors.New("answers with too many entries")

// Decode is json.Unmarshal of a text whose arrays and objects have no more than so many elements.
func Decode(text []byte, most int, into any) error {
	if elements(text) > most {
		return ErrElements
	}
	return json.Unmarshal(text, into)
}

// elements is how many elements the arrays of a JSON text have, or a few more: each comma is
// before an element or a member, and each bracket may be before the first one, and members are
// those with a colon. What is no JSON may have any number, and json.Unmarshal does not begin.
func elements(text []byte) (n int) {
	quoted := false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			quoted = !quoted
		case quoted && c == '\\':
			i++
		case quoted:
		case c == ',' || c == '[' || c == '{':
			n++
		case c == ':':
			n--
		}
	}
	return n
}
