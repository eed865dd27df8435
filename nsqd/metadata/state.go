// Package metadata stores a node's topics and channels on disk, with their pauses and contracts:
// all state of a node except its messages. The package must not know what a topic does.
//
// The file is JSON, readable by people, with a checksum over the topics. A write replaces the
// whole file. Changes of a large file go to a second file. A damaged or edited file is an error and
// never yields half a list. Read state.go next.
package metadata

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"

	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/tokenbucket"
)

// State is the stored state of a node, without ephemeral topics and channels.
type State struct {
	Topics []Topic // by name
}

type Topic struct {
	Name     string           `json:"name"`
	Paused   bool             `json:"paused,omitempty"`
	Contract *Contract        `json:"contract,omitempty"` // nil: no contract, or set again at each start
	Channels []Channel        `json:"channels,omitempty"` // by name
	Identity Identity         `json:"identity,omitzero"`  // zero: unknown
	Retain   *Retention       `json:"retain,omitempty"`   // nil: the node's default
	Expiry   *expiry.Settings `json:"expiry,omitempty"`   // nil: messages do not expire
	// Expiries holds the settings of channels, including channels that do not exist yet.
	Expiries map[string]expiry.Settings `json:"expiries,omitempty"`
	// Logged means that the message folder has a log of the topic, with cursors. The broker sets
	// Logged after it creates the log and before the log takes a message, and clears Logged
	// before it removes the log. If Logged is set and the log is missing, the log was deleted.
	Logged bool `json:"logged,omitempty"`
}

// Identity distinguishes topics of the same name, as assigned by the control plane.
type Identity struct {
	Log     uint64 `json:"log"`
	Created uint64 `json:"created"`
}

// Contract is the contract of a standalone topic.
type Contract struct {
	RateMilli int64 `json:"rate_milli"` // thousandths of messages per second
	Burst     int64 `json:"burst"`      // messages
	Reject    bool  `json:"reject,omitempty"`
}

// Share returns the contract as a token bucket's share.
func (c *Contract) Share() tokenbucket.Share {
	return tokenbucket.Share{Rate: tokenbucket.Rate(c.RateMilli), Burst: c.Burst}
}

type Channel struct {
	Name   string `json:"name"`
	Paused bool   `json:"paused,omitempty"`
	// Created is the catalog version at which the channel was created, in the log of the topic's
	// Identity. 0: the control plane does not know the channel.
	Created uint64 `json:"created,omitempty"`
}

// The errors of Parse, wrapped.
var (
	// ErrDamaged: the file differs from what Write wrote.
	ErrDamaged = errors.New("metadata is damaged")
	// ErrVersion: a later release wrote the file.
	ErrVersion = errors.New("metadata of an unknown version")
)

const version = 1

// document is the file. The checksum covers Topics without white space.
type document struct {
	Version int             `json:"version"`
	CRC32C  string          `json:"crc32c"` // 8 hexadecimal digits
	Topics  json.RawMessage `json:"topics"`
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(topics []byte) string { return fmt.Sprintf("%08x", crc32.Checksum(topics, castagnoli)) }

// Encode returns the file's content. The error says what Parse would refuse.
func Encode(s State) ([]byte, error) {
	b, _, err := encode(s)
	return b, err
}

// encode is Encode, with the checksum of the topics.
func encode(s State) (b []byte, sum string, err error) {
	if err := s.validate(); err != nil {
		return nil, "", fmt.Errorf("encode metadata: %w", err)
	}
	all := s.Topics
	if all == nil {
		all = []Topic{}
	}
	topics, err := json.Marshal(all)
	if err != nil {
		return nil, "", fmt.Errorf("encode metadata: %w", err)
	}
	sum = checksum(topics)
	b, err = json.MarshalIndent(document{Version: version, CRC32C: sum, Topics: topics}, "", "  ")
	if err != nil {
		return nil, "", fmt.Errorf("encode metadata: %w", err)
	}
	return append(b, '\n'), sum, nil
}

// Parse is the inverse of Encode. Errors: ErrDamaged, ErrVersion.
func Parse(b []byte) (State, error) {
	s, _, err := parse(b)
	return s, err
}

// parse is Parse, with the checksum of the topics.
func parse(b []byte) (s State, sum string, err error) {
	damaged := func(err error) (State, string, error) { return State{}, "", fmt.Errorf("%w: %w", ErrDamaged, err) }
	var doc document
	if err := json.Unmarshal(b, &doc); err != nil {
		return damaged(err)
	}
	if doc.Version != version {
		return State{}, "", fmt.Errorf("%w: %d, this release knows %d", ErrVersion, doc.Version, version)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, doc.Topics); err != nil {
		return damaged(err)
	}
	if sum = checksum(compact.Bytes()); sum != doc.CRC32C {
		return damaged(fmt.Errorf("its checksum is %s, and says %q", sum, doc.CRC32C))
	}
	if err := json.Unmarshal(doc.Topics, &s.Topics); err != nil {
		return damaged(err)
	}
	if err := s.validate(); err != nil {
		return damaged(err)
	}
	return s, sum, nil
}

// validate returns the first invalid entry as an error.
func (s State) validate() error {
	for i, t := range s.Topics {
		if !wire.ValidTopicName(t.Name) || wire.Ephemeral(t.Name) {
			return fmt.Errorf("topic %q has no name that could be kept", t.Name)
		}
		if i > 0 && s.Topics[i-1].Name >= t.Name {
			return fmt.Errorf("topic %q is not after %q", t.Name, s.Topics[i-1].Name)
		}
		if t.Contract != nil {
			share := t.Contract.Share()
			if err := share.Validate(); err != nil || share.IsZero() {
				return fmt.Errorf("topic %q has a contract of %d/1000 msg/s and %d messages", t.Name, t.Contract.RateMilli, t.Contract.Burst)
			}
		}
		if err := t.Retain.validate(); err != nil {
			return fmt.Errorf("topic %q: %w", t.Name, err)
		}
		if t.Expiry != nil {
			if err := t.Expiry.Validate(t.Name); err != nil {
				return fmt.Errorf("topic %q: expiry: %w", t.Name, err)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(t.Expiries)) {
			if err := t.Expiries[name].Validate(t.Name); err != nil || !wire.ValidChannelName(name) {
				return fmt.Errorf("topic %q: channel %q: %w", t.Name, name, cmp.Or(err, errors.New("not a name")))
			}
		}
		for j, c := range t.Channels {
			if !wire.ValidChannelName(c.Name) || wire.Ephemeral(c.Name) {
				return fmt.Errorf("channel %q of topic %q has no name that could be kept", c.Name, t.Name)
			}
			if j > 0 && t.Channels[j-1].Name >= c.Name {
				return fmt.Errorf("channel %q of topic %q is not after %q", c.Name, t.Name, t.Channels[j-1].Name)
			}
		}
	}
	return nil
}
