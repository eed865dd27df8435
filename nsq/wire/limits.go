package wire

import (
	"math"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
)

// MaxLine is the maximum length of a command line in bytes, including its end of line. The longest
// valid line, SUB with two names of full length, has 135 bytes. The rest allows a precise error for
// a name that is too long. A peer that sends MaxLine bytes without an end of line is refused.
const MaxLine = 512

// MaxIdentityBody is the maximum size of an IDENTIFY or AUTH body in bytes, unless
// Limits.MaxBodySize is less. Such a body is parsed in one go, while other clients wait.
const MaxIdentityBody = 64 << 10

const maxDuration = time.Duration(math.MaxInt64)

// Limits are the limits of commands. All are inclusive.
type Limits struct {
	MaxMessageSize  int           // bytes of one message, at least 1
	MaxBodySize     int           // bytes of an MPUB body, and of an IDENTIFY or AUTH body if less than MaxIdentityBody; at least 1
	MaxReqTimeout   time.Duration // maximum delay of REQ; a longer delay is reduced to it
	MaxDeferTimeout time.Duration // maximum delay of DPUB; a longer delay is refused; 0 means MaxReqTimeout
	MaxRdy          int           // maximum RDY count
	Pace            bool          // PACE is a command; otherwise unknown, as in NSQ
	Attributes      bool          // each message's body begins with an attribute, which MaxMessageSize does not include
}

// DefaultLimits returns the documented defaults of upstream's nsqd.
func DefaultLimits() Limits {
	return Limits{
		MaxMessageSize: 1 << 20,
		MaxBodySize:    5 << 20,
		MaxReqTimeout:  time.Hour,
		MaxRdy:         2500,
	}
}

// Validate returns all faults of l at once.
func (l Limits) Validate() error {
	var errs faults.List
	errs.If(l.MaxMessageSize < 1 || l.MaxMessageSize > math.MaxInt32-MessageOverhead,
		"--max-msg-size %d bytes is outside [1, %d]", l.MaxMessageSize, math.MaxInt32-MessageOverhead)
	errs.If(l.MaxBodySize < 1 || l.MaxBodySize > math.MaxInt32,
		"--max-body-size %d bytes is outside [1, %d]", l.MaxBodySize, math.MaxInt32)
	errs.If(l.MaxReqTimeout < 0, "--max-req-timeout %v is negative", l.MaxReqTimeout)
	errs.If(l.MaxDeferTimeout < 0, "--max-defer-timeout %v is negative", l.MaxDeferTimeout)
	errs.If(l.MaxRdy < 1, "--max-rdy-count %d is below 1", l.MaxRdy)
	return errs.Err()
}

// MaxCommandSize is the maximum need that Command.Parse can return under l. A buffer of this size
// holds any command.
func (l Limits) MaxCommandSize() int {
	return MaxLine + sizeLength + max(l.maxBody(), l.MaxBodySize)
}

// MaxDefer returns the maximum delay of a deferred publish.
func (l Limits) MaxDefer() time.Duration {
	if l.MaxDeferTimeout == 0 {
		return l.MaxReqTimeout
	}
	return l.MaxDeferTimeout
}
