package agent

import (
	"fmt"
	"strconv"
	"time"

	"google.golang.org/grpc/status"

	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/service"
)

// This file has the owner's reaction when the control plane refuses the broker's id
// (internal/identity).

// TakenError ends the agent: the broker's id belongs to another process.
type TakenError struct{ Problem string }

func (e *TakenError) Error() string {
	return e.Problem + ". This process stops. To run both, give one of them another --broker-id; to replace the other one, stop it first"
}

// claim tracks the answers to the hellos of one session.
type claim struct {
	lastHello mono.Time // time of the newest hello
	refused   mono.Time // first refusal since the last accepted hello; 0: none
}

func (c *claim) accepted() { c.refused = 0 }

// heardMargin is how long after the first refusal the other process must reach the control plane
// before the other process counts as alive. A late message of an ended process does not arrive that late.
const heardMargin = 500 * time.Millisecond

// refused handles the end of a session that was refused because the broker's id belongs to another
// process. At the first refusal the owner gives up every share, for the other process may use the
// shares. If the id belongs to a later process, this process ends. If the other process may have ended,
// this process sends hello again: the other session may be half open, with a lease that is not over. If
// the other process sent a message after the first refusal, the other process lives, and this process
// ends.
func (o *owner) refused(c *claim, err error, now mono.Time) {
	reason := service.Reason(err)
	if reason != identity.ReasonInUse && reason != identity.ReasonLost {
		return
	}
	problem := status.Convert(err).Message()
	if c.refused == 0 {
		c.refused = now
		o.cfg.Log.Warn("the broker id belongs to another process; this one gives up its shares", obs.KeyBroker, o.cfg.BrokerID, obs.KeyError, problem, "topics", len(o.holdings.Topics()))
		o.giveUp(errTaken)
	}
	if reason == identity.ReasonLost {
		o.taken = &TakenError{problem}
		return
	}
	silent, parseErr := strconv.ParseInt(service.Info(err).GetMetadata()[identity.HeardKey], 10, 64)
	if parseErr != nil || silent < 0 {
		return // unknown whether the other process lives
	}
	if lastHeard := c.lastHello.Add(-time.Duration(silent) * time.Millisecond); lastHeard.Sub(c.refused) > heardMargin {
		o.taken = &TakenError{fmt.Sprintf("%s, which is alive: it sent a message after the first refusal of this process", problem)}
	}
}
