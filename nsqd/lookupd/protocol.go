package lookupd

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/srtm-io/srtm/internal/bounded"
)

// Node describes a node to the daemons. A port is -1 if the node has none.
type Node struct {
	BroadcastAddress string `json:"broadcast_address"`
	Hostname         string `json:"hostname"`
	HTTPPort         int    `json:"http_port"`
	TCPPort          int    `json:"tcp_port"`
	Version          string `json:"version"`
	Region           string `json:"topology_region,omitempty"`
	Zone             string `json:"topology_zone,omitempty"`
}

// The protocol, from the node's side. After the magic, commands and answers alternate:
//
//	"  V1"
//	IDENTIFY\n [4-byte size][JSON of Node]     -> JSON of the daemon
//	REGISTER topic [channel]\n                 -> OK
//	UNREGISTER topic [channel]\n               -> OK
//	PING\n                                     -> OK
//
//	[x][x][x][x] [x]...        an answer; an error begins with "E_"
//	  (uint32)   || N bytes
//	   size N       data
const magic = "  V1"

func appendIdentify(dst []byte, n Node) ([]byte, error) {
	body, err := json.Marshal(n)
	if err != nil {
		return nil, fmt.Errorf("encode IDENTIFY: %w", err)
	}
	dst = append(dst, "IDENTIFY\n"...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(body)))
	return append(dst, body...), nil
}

const pingCommand = "PING\n"

// key is a registration: a topic, or one of its channels.
type key struct{ topic, channel string } // channel "": the topic itself

func (k key) append(dst []byte, verb string) []byte {
	dst = append(dst, verb...)
	dst = append(dst, ' ')
	dst = append(dst, k.topic...)
	if k.channel != "" {
		dst = append(dst, ' ')
		dst = append(dst, k.channel...)
	}
	return append(dst, '\n')
}

type Topic struct {
	Name     string
	Channels []string
}

func keysOf(topics []Topic) map[key]bool {
	keys := make(map[key]bool)
	for _, t := range topics {
		keys[key{t.Name, ""}] = true
		for _, c := range t.Channels {
			keys[key{t.Name, c}] = true
		}
	}
	return keys
}

// changes returns the commands that turn have into want, in a fixed order: removed channels
// before their topic, new channels after their topic.
func changes(have, want map[key]bool) [][]byte {
	var commands [][]byte
	byName := func(a, b key) int {
		return strings.Compare(a.topic+" "+a.channel, b.topic+" "+b.channel)
	}
	removed := slices.SortedFunc(maps.Keys(have), byName)
	for _, k := range slices.Backward(removed) {
		if !want[k] {
			commands = append(commands, k.append(nil, "UNREGISTER"))
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(want), byName) {
		if !have[k] {
			commands = append(commands, k.append(nil, "REGISTER"))
		}
	}
	return commands
}

// maxAnswer bounds an answer over TCP, in bytes. The longest answer, to IDENTIFY, has a few
// hundred.
const maxAnswer = 64 << 10

func readAnswer(r io.Reader) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(size[:])
	if n > maxAnswer {
		return nil, fmt.Errorf("answer of %d bytes is longer than %d", n, maxAnswer)
	}
	answer := make([]byte, n)
	if _, err := io.ReadFull(r, answer); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return answer, nil
}

// expectOK returns an error unless the answer is OK.
func expectOK(answer []byte) error {
	if string(answer) == "OK" {
		return nil
	}
	return fmt.Errorf("answers %.200q", answer)
}

// identity is a daemon's answer to IDENTIFY.
type identity struct {
	BroadcastAddress string `json:"broadcast_address"`
	HTTPPort         int    `json:"http_port"`
}

func parseIdentity(answer []byte) (identity, error) {
	var id identity
	if err := json.Unmarshal(answer, &id); err != nil {
		return identity{}, fmt.Errorf("answers IDENTIFY with %.200q: %w", answer, err)
	}
	if id.HTTPPort < 0 || id.HTTPPort > 65535 {
		return identity{}, fmt.Errorf("answers IDENTIFY with HTTP port %d", id.HTTPPort)
	}
	return id, nil
}

// parseChannels parses the answer to GET /channels?topic=.
func parseChannels(body []byte) ([]string, error) {
	var answer struct {
		Channels []string `json:"channels"`
	}
	if err := bounded.Decode(body, bounded.MaxElements, &answer); err != nil {
		return nil, fmt.Errorf("answers /channels with %.200q: %w", body, err)
	}
	return answer.Channels, nil
}
