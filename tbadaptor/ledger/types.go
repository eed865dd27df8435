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

// Grant is what a broker is to be told: from now on it holds Share.
type Grant struct {
	Broker string
	Topic  string
	// Epoch is above that of every grant made before, of any topic.
	Epoch uint64
	// Share replaces the one the broker holds; zero: it holds nothing.
	Share tokenbucket.Share
	// Flex is the part of Share that ends with the broker's lease; the rest is
	// its base.
	Flex tokenbucket.Share
	// Tokens come on top of what the bucket holds (tokenbucket.Retune).
	Tokens tokenbucket.Tokens
}

// Base returns what is left of the share when the broker's lease is over.
func (g Grant) Base() tokenbucket.Share { return g.Share.Less(g.Flex) }

// Session is what a broker says of itself at the beginning of a session.
type Session struct {
	Broker string
	// Said is when the broker said so, and which process of the broker did.
	Said mono.Said
	// Place is where the process runs.
	Place  identity.Place
	Policy Policy
	// Held is everything it holds.
	Held []Held
}

// Held is a share that a broker reports when it says hello.
type Held struct {
	Topic string
	// Share is all it holds, Flex what of it ends with its lease.
	Share, Flex tokenbucket.Share
	// Epoch of the grant that gave it.
	Epoch uint64
}

// Policy is what a broker does when its lease is gone for good.
type Policy uint8

const (
	// Leaseless brokers know no leases: all they are granted is base, and theirs
	// until they give it up.
	Leaseless Policy = iota
	// Available brokers go on with their base.
	Available
	// Strict brokers stop when the session's lease is over.
	Strict
)

// Leases are the times a broker may go on without a word from here. They are
// counted by the broker from when it asked, and here from when it was answered,
// which is no earlier.
type Leases struct {
	// Flex is how long the flexible part of shares lasts; 0: nothing is
	// flexible, every share is base.
	Flex time.Duration
	// Session is how long the base of a Strict broker lasts; >= Flex.
	Session time.Duration
	// ClockBound is by how much two clocks may have come apart after Session.
	ClockBound time.Duration
	// PresumeDead is after how long without a word the base of an Available
	// broker is granted to others, as if it were known to be dead. If it is
	// not, the contract is exceeded by its base for as long as it is cut off. 0:
	// never; then it takes Forget, or a new process under its id.
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
		"--presume-dead-after %v is shorter than --session-lease %v, for which brokers go on", l.PresumeDead, l.Session)
	return f.Err()
}

// Terms are what a contract is put under a ledger's care with.
type Terms struct {
	Contract tokenbucket.Share
	// Flex is the part of each share that ends with its broker's lease, as far
	// as there are leases.
	Flex Permille
	// Former is the most that all brokers together may hold of what earlier ledgers granted.
	// Zero: not known.
	Former tokenbucket.Share
}

// Permille is a fraction in thousandths, 0 to 1000.
type Permille int64

// Lapse is a lease that is over.
type Lapse struct {
	Broker string
	// Session: the broker's session ends with it. What it holds is not known any
	// more until it says hello again.
	Session bool
	// Flex: the flexible parts of its shares are free; Base: all it held is.
	Flex, Base bool
}

// TopicView is a copy of what the ledger knows of a topic.
type TopicView struct {
	Topic string
	// Contract is zero for a topic that brokers report and that was not set.
	Contract tokenbucket.Share
	// Removing: the contract was removed, some broker may still be using it.
	Removing bool
	// Settled: every broker has acknowledged the share it is meant to have.
	Settled bool
	// Awaited are the brokers that must say what they hold of an adopted contract, sorted.
	// Until then shares grow only by what none of these brokers can hold.
	Awaited []string
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
	// Base is the part of Acknowledged that does not end with the lease.
	Base tokenbucket.Share
	// Reserved is the most it may be using: of rate and burst, the larger.
	Reserved  tokenbucket.Share
	Connected bool
	Policy    Policy
	// Lapsed: its lease is over, and with it the flexible part of its share.
	Lapsed bool
}

var (
	// ErrUnknownTopic: no contract is set for the topic.
	ErrUnknownTopic = errors.New("no contract is set for the topic")
	// ErrConnected: the broker is connected, so it cannot be forgotten.
	ErrConnected = errors.New("the broker is connected")
	// ErrMayGoOn: a process after the one that has ended might use its bases.
	ErrMayGoOn = errors.New("a process after it may go on with its bases")
	// ErrUnknownBroker: no topic has the broker, or waits for it.
	ErrUnknownBroker = errors.New("no share is known of such a broker")
)

// Freed is what a broker that is forgotten had reserved of a topic.
type Freed struct {
	Topic string
	Share tokenbucket.Share
	// Unknown: the topic was waiting for the broker to say what it holds.
	Unknown bool
}

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
