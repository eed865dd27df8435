package ledger

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Grant is the share that a broker holds from now on.
type Grant struct {
	Broker string
	Topic  string
	// Epoch is above the epoch of every earlier grant, of any topic.
	Epoch uint64
	// Share replaces the broker's share; zero: the broker holds nothing.
	Share tokenbucket.Share
	// Flex is the part of Share that ends with the broker's lease; the rest is the base.
	Flex tokenbucket.Share
	// Tokens are added to the tokens in the bucket (tokenbucket.Retune).
	Tokens tokenbucket.Tokens
}

// Base returns the share that remains when the broker's lease is over.
func (g Grant) Base() tokenbucket.Share { return g.Share.Less(g.Flex) }

// Session is a broker's report at the start of a session.
type Session struct {
	Broker string
	// Stamp identifies the broker's process and the time of the report.
	Stamp  mono.Stamp
	Place  identity.Place
	Policy Policy
	// Shares lists every share that the broker holds.
	Shares []HeldShare
}

// HeldShare is a share that a broker reports in its hello.
type HeldShare struct {
	Topic string
	// Share is the whole share, Flex the part that ends with the lease.
	Share, Flex tokenbucket.Share
	// Epoch is the epoch of the share's grant.
	Epoch uint64
}

// Policy is a broker's behaviour when its lease is over.
type Policy uint8

const (
	// Leaseless brokers have no leases: the whole share is base, and stays reserved until the broker
	// gives up the share.
	Leaseless Policy = iota
	// Available brokers continue with their base.
	Available
	// Strict brokers stop when the session's lease is over.
	Strict
)

// Leases are the times that a broker may continue without an answer of the ledger. The broker counts
// them from its request, the ledger from the (later) receipt of the request.
type Leases struct {
	// Flex is the lease of the flexible parts; 0: every share is all base.
	Flex time.Duration
	// Session is the lease of a Strict broker's base; >= Flex.
	Session time.Duration
	// ClockBound is the maximum drift between two clocks in Session.
	ClockBound time.Duration
	// PresumeDead is the silence after which an Available broker is presumed dead and its base is
	// granted to other brokers. If the broker lives, the contract is exceeded by its base while the
	// broker is disconnected. 0: never presumed dead; then only Forget or a new process with its id
	// frees the base.
	PresumeDead time.Duration
}

// Validate returns all problems at once, by the names of the daemons' flags.
func (l Leases) Validate() error {
	var f faults.List
	f.If(l.Flex < 0, "--flex-lease %v is negative", l.Flex)
	f.If(l.Session < l.Flex, "--session-lease %v is shorter than --flex-lease %v", l.Session, l.Flex)
	f.If(l.ClockBound < 0, "--clock-bound %v is negative", l.ClockBound)
	f.If(l.PresumeDead < 0, "--presume-dead-after %v is negative", l.PresumeDead)
	f.If(l.PresumeDead > 0 && l.PresumeDead < l.Session,
		"--presume-dead-after %v is shorter than --session-lease %v, during which brokers keep their bases", l.PresumeDead, l.Session)
	return f.Err()
}

// Terms are the terms of a contract.
type Terms struct {
	Contract tokenbucket.Share
	// Flex is the part of each share that ends with its broker's lease, if there are leases.
	Flex Permille
	// Former is the most that all brokers together may hold from earlier ledgers' grants. Zero:
	// unknown.
	Former tokenbucket.Share
}

// Permille is a fraction in thousandths, 0 to 1000.
type Permille int64

// Lapse is a lease that has ended.
type Lapse struct {
	Broker string
	// Session: the broker's session ended with the lease. The broker's share is unknown until the next
	// hello.
	Session bool
	// Flex: the flexible parts of the broker's shares are free. Base: its bases are free, too.
	Flex, Base bool
}

// TopicView is a copy of the ledger's state of a topic.
type TopicView struct {
	Topic string
	// Contract is zero if brokers report the topic but no contract was set.
	Contract tokenbucket.Share
	// Removing: the contract was removed, but some broker may still be using it.
	Removing bool
	// Settled: every broker has acknowledged its target share.
	Settled bool
	// Awaited has the brokers that have yet to report their shares of an adopted contract, sorted.
	// Until then other shares grow only by the part that no awaited broker can hold.
	Awaited []string
	// Pool is the number of tokens kept for shares that grow.
	Pool tokenbucket.Tokens
	// Members is sorted by broker.
	Members []MemberView
}

// MemberView is a copy of the ledger's state of a broker in a topic.
type MemberView struct {
	Broker string
	// Target is the share that the broker is meant to have.
	Target tokenbucket.Share
	// Granted is the last granted share, Acknowledged the last acknowledged share. They differ while a
	// grant is in transit.
	Granted           tokenbucket.Share
	GrantedEpoch      uint64
	Acknowledged      tokenbucket.Share
	AcknowledgedEpoch uint64
	// Base is the part of Acknowledged that does not end with the lease.
	Base tokenbucket.Share
	// Reserved is the most that the broker may be using, separately in rate and burst.
	Reserved  tokenbucket.Share
	Connected bool
	Policy    Policy
	// Lapsed: the broker's lease is over, and with it the flexible part of its share.
	Lapsed bool
}

var (
	// ErrUnknownTopic: the topic has no contract.
	ErrUnknownTopic = errors.New("no contract is set for the topic")
	// ErrConnected: the broker is connected, so its shares cannot be freed.
	ErrConnected = errors.New("the broker is connected")
	// ErrMayGoOn: the broker's next process might use the bases of the ended process.
	ErrMayGoOn = errors.New("a later process of the broker may keep using its bases")
	// ErrUnknownBroker: no topic has or awaits the broker.
	ErrUnknownBroker = errors.New("no share is known of such a broker")
)

// Freed is the share of a topic that was reserved for a forgotten or ended broker.
type Freed struct {
	Topic string
	Share tokenbucket.Share
	// Unknown: the topic was waiting for the broker's report.
	Unknown bool
}

// Conflict reports that the topic already has another contract.
type Conflict struct {
	Topic              string
	Current, Requested tokenbucket.Share
}

func (e *Conflict) Error() string {
	return fmt.Sprintf("topic %q has the contract %d milli-msg/s, burst %d; it cannot become %d, %d without being removed",
		e.Topic, e.Current.Rate, e.Current.Burst, e.Requested.Rate, e.Requested.Burst)
}

// Busy reports that the topic was removed but brokers may still be using shares of the old contract.
type Busy struct {
	Topic   string
	Brokers []string // sorted
}

func (e *Busy) Error() string {
	return fmt.Sprintf("topic %q is being removed: waiting for %s to give up what they hold of it",
		e.Topic, strings.Join(e.Brokers, ", "))
}
