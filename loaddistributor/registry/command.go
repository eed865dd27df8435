package registry

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/srtm-io/srtm/nsq/wire"
)

// The protocol, from the server's side. After the magic, commands and answers alternate:
//
//	"  V1"
//	IDENTIFY\n [4-byte size][JSON of Node]     -> JSON of Node
//	REGISTER topic [channel]\n                 -> OK
//	UNREGISTER topic [channel]\n               -> OK
//	PING\n                                     -> OK
//
//	[x][x][x][x] [x]...        an answer; an error begins with "E_", and is the
//	  (uint32)   || N bytes    last answer of its connection
//	   size N       data
const (
	// Magic opens a connection.
	Magic = "  V1"
	// MaxLine is the maximum length of a command without its body, in bytes, including the
	// end of line. The longest useful command has 140 bytes.
	MaxLine = 1024
	// MaxBody is the maximum length of an IDENTIFY body, in bytes.
	MaxBody = 64 << 10
	// MaxField is the maximum length of a text in an IDENTIFY body, in bytes. It exceeds
	// the maximum length of a host name.
	MaxField = 256
)

// Error codes.
const (
	CodeBadProtocol = "E_BAD_PROTOCOL"
	CodeInvalid     = "E_INVALID"
	CodeBadBody     = "E_BAD_BODY"
	CodeBadTopic    = "E_BAD_TOPIC"
	CodeBadChannel  = "E_BAD_CHANNEL"
)

// Error is a refusal. It ends its connection.
type Error struct{ Code, Text string }

func (e *Error) Error() string {
	if e.Text == "" {
		return e.Code
	}
	return e.Code + " " + e.Text
}

func refuse(code, format string, args ...any) *Error {
	return &Error{Code: code, Text: fmt.Sprintf(format, args...)}
}

// Verb is the kind of a command.
type Verb uint8

// The verbs. The zero value is no verb.
const (
	Identify Verb = iota + 1
	Register
	Unregister
	Ping
)

// Command is a parsed command.
type Command struct {
	Verb           Verb
	Topic, Channel string // of Register, Unregister; Channel "": the topic itself
	Node           Node   // of Identify
}

// Node describes a node in IDENTIFY, and the server in its answer.
type Node struct {
	BroadcastAddress string `json:"broadcast_address"`
	Hostname         string `json:"hostname"`
	HTTPPort         int    `json:"http_port"`
	TCPPort          int    `json:"tcp_port"`
	Version          string `json:"version"`
}

// ParseMagic parses the magic at the beginning of in and returns the magic's length, or 0
// if more bytes are needed.
func ParseMagic(input []byte) (int, error) {
	prefix := input[:min(len(input), len(Magic))]
	if string(prefix) != Magic[:len(prefix)] {
		return 0, &Error{Code: CodeBadProtocol}
	}
	if len(prefix) < len(Magic) {
		return 0, nil
	}
	return len(Magic), nil
}

// Parse parses a command at the beginning of in and returns the command's length, or 0 if
// more bytes are needed. The command shares no memory with in. A command takes at most
// MaxLine + 4 + MaxBody bytes.
func Parse(input []byte) (Command, int, error) {
	end := bytes.IndexByte(input[:min(len(input), MaxLine)], '\n')
	if end < 0 {
		if len(input) >= MaxLine {
			return Command{}, 0, refuse(CodeInvalid, "command is longer than %d bytes", MaxLine)
		}
		return Command{}, 0, nil
	}
	words := strings.Split(strings.TrimSpace(string(input[:end])), " ")
	verb, params := words[0], words[1:]
	n := end + 1
	switch verb {
	case "PING":
		return Command{Verb: Ping}, n, nil
	case "REGISTER", "UNREGISTER":
		c := Command{Verb: Register}
		if verb == "UNREGISTER" {
			c.Verb = Unregister
		}
		if len(params) == 0 {
			return Command{}, 0, refuse(CodeInvalid, "%s insufficient number of params", verb)
		}
		c.Topic = params[0]
		if len(params) > 1 {
			c.Channel = params[1]
		}
		if !wire.ValidTopicName(c.Topic) {
			return Command{}, 0, refuse(CodeBadTopic, "%s topic name '%s' is not valid", verb, printable(c.Topic))
		}
		if c.Channel != "" && !wire.ValidChannelName(c.Channel) {
			return Command{}, 0, refuse(CodeBadChannel, "%s channel name '%s' is not valid", verb, printable(c.Channel))
		}
		return c, n, nil
	case "IDENTIFY":
		body, size, err := parseBody(input[n:])
		if err != nil || size == 0 {
			return Command{}, 0, err
		}
		node, err := parseNode(body)
		if err != nil {
			return Command{}, 0, err
		}
		return Command{Verb: Identify, Node: node}, n + size, nil
	}
	return Command{}, 0, refuse(CodeInvalid, "invalid command %s", printable(verb))
}

// parseBody returns a body and its length including the size field, or 0 if more bytes
// are needed.
func parseBody(input []byte) (body []byte, n int, err error) {
	if len(input) < 4 {
		return nil, 0, nil
	}
	size := binary.BigEndian.Uint32(input)
	if size == 0 || size > MaxBody {
		return nil, 0, refuse(CodeBadBody, "IDENTIFY body of %d bytes, want 1 to %d", int32(size), MaxBody)
	}
	if len(input) < 4+int(size) {
		return nil, 0, nil
	}
	return input[4 : 4+size], 4 + int(size), nil
}

// parseNode parses an IDENTIFY body. Port -1 means no port, as sent by a node on a Unix
// socket. Port 0 means a missing field.
func parseNode(body []byte) (Node, error) {
	var n Node
	if err := json.Unmarshal(body, &n); err != nil {
		return Node{}, refuse(CodeBadBody, "IDENTIFY failed to decode JSON body")
	}
	if n.BroadcastAddress == "" || n.TCPPort == 0 || n.HTTPPort == 0 || n.Version == "" {
		return Node{}, refuse(CodeBadBody, "IDENTIFY missing fields")
	}
	for _, text := range []string{n.BroadcastAddress, n.Hostname, n.Version} {
		if len(text) > MaxField {
			return Node{}, refuse(CodeBadBody, "IDENTIFY field of %d bytes is longer than %d", len(text), MaxField)
		}
	}
	for _, port := range []int{n.TCPPort, n.HTTPPort} {
		if port < -1 || port > 65535 {
			return Node{}, refuse(CodeBadBody, "IDENTIFY port %d is outside -1 to 65535", port)
		}
	}
	return n, nil
}

// printable cuts a client's text to 80 bytes of valid UTF-8, for an answer.
func printable(text string) string {
	const maxShown = 80
	return strings.ToValidUTF8(text[:min(len(text), maxShown)], "?")
}
