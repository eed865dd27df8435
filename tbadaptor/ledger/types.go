package ledger

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/srtm-io/srtm/tokenbucket"
)

// Grant is what a broker is to be told: from now on it holds Share.
type Grant struct {
	Broker string
	Topic  string
	// Epoch is above that of every grant made before, of any topic.
	Epoch uint64
	// Share replaces the one the broker holds; zero: it holds nothing.
	Share tokenbucket.Share
	// Tokens come on top of what the bucket holds (tokenbucket.Retune).
	Tokens tokenbucket.Tokens

	// Flex is the part of Share that is held on a lease of length Lease. Both
	// are zero in this version: all of Share is the broker's until it
	// acknowledges another.
	Flex  tokenbucket.Share
	Lease time.Duration
}

// Held is a share that a broker reports when it says hello.
type Held struct {
	Topic string
	Share tokenbucket.Share
	// Epoch of the grant that gave it.
	Epoch uint64
}

// TopicView is a copy of what the ledger knows of a topic.
type TopicView struct {
	Topic string
	// Contract is zero for a topic that brokers report and nobody set.
	Contract tokenbucket.Share
	// Removing: the contract was removed, some broker may still be using it.
	Removing bool
	// Settled: every broker has acknowledged the share it is meant to have.
	Settled bool
	// Pool is how many tokens wait for a share that grows.
	Pool tokenbucket.Tokens
	// Members are sorted by broker.
	Members []MemberView
}

// MemberView is a copy of what the ledger knows of one broker of a topic.
type MemberView struct {
	Broker string
	// Target is the share it is meant to have in the end.
	Target tokenbucket.Share
	// Granted is what it was granted last, Acknowledged what it acknowledged
	// last. They differ while a grant is on its way.
	Granted           tokenbucket.Share
	GrantedEpoch      uint64
	Acknowledged      tokenbucket.Share
	AcknowledgedEpoch uint64
	// Reserved is the most it may be using: of rate and burst, the larger.
	Reserved  tokenbucket.Share
	Connected bool
}

var (
	// ErrUnknownTopic: no contract is set for the topic.
	ErrUnknownTopic = errors.New("no contract is set for the topic")
	// ErrReplaced: the instance that says hello was replaced by a later one.
	ErrReplaced = errors.New("the instance was replaced by a later one")
	// ErrConnected: the broker is connected, so it cannot be forgotten.
	ErrConnected = errors.New("the broker is connected")
)

// Conflict reports that the topic has another contract already.
type Conflict struct {
	Topic     string
	Have, Got tokenbucket.Share
}

func (e *Conflict) Error() string {
	return fmt.Sprintf("topic %q has the contract %d milli-msg/s, burst %d; it cannot become %d, %d without being removed",
		e.Topic, e.Have.Rate, e.Have.Burst, e.Got.Rate, e.Got.Burst)
}

// Busy reports that the topic was removed, but brokers may still be using
// shares of the old contract.
type Busy struct {
	Topic   string
	Brokers []string // sorted
}

func (e *Busy) Error() string {
	return fmt.Sprintf("topic %q is being removed: waiting for %s to give up what they hold of it",
		e.Topic, strings.Join(e.Brokers, ", "))
}
