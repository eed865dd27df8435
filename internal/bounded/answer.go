package bounded

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Read returns an answer of at most most bytes, or an error.
func Read(body io.Reader, limit int64) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(body, limit+1))
	if err == nil && int64(len(text)) > limit {
		return nil, fmt.Errorf("answers with more than %d bytes", limit)
	}
	return text, err
}

// MaxElements is a limit for Decode if nothing is known about the answer.
const MaxElements = 1 << 16

// ErrElements: an answer would take far more memory than its text.
var ErrElements = errors.New("answers with too many entries")

// Decode is json.Unmarshal for a text whose arrays and objects have at most most
// elements.
func Decode(text []byte, limit int, value any) error {
	if elements(text) > limit {
		return ErrElements
	}
	return json.Unmarshal(text, value)
}

// elements returns the number of array elements in a JSON text, or slightly more. It
// counts commas and opening brackets, less the members with a colon. For text that is not
// JSON the number is meaningless, but json.Unmarshal refuses such text before allocating.
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
