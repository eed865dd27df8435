package loop

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"

	"github.com/srtm-io/srtm/internal/bidi"
	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/refusal"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
)

// Reasons in ErrorInfo. The reasons are part of the API: clients may depend on them.
const (
	ReasonBadRequest  = refusal.BadRequest
	ReasonClosing     = "SHUTTING_DOWN"
	ReasonReplaced    = "SESSION_REPLACED"
	ReasonNoHello     = "NO_HELLO"
	ReasonSlow        = "SLOW_READER"
	ReasonConflict    = "CONTRACT_CONFLICT"
	ReasonBusy        = "CONTRACT_BUSY"
	ReasonUnsettled   = "SHARES_NOT_ACKNOWLEDGED"
	ReasonLapsed      = "LEASE_OVER"
	ReasonConnected   = "BROKER_CONNECTED"
	ReasonUnknown     = "BROKER_UNKNOWN"
	ReasonMayGoOn     = "BROKER_MAY_GO_ON"
	ReasonRemoved     = "CONTRACT_REMOVED"
	ReasonBadSequence = "BAD_SEQUENCE"
	ReasonNotLeading  = "NOT_LEADING"
	ReasonOldTerm     = "OLD_TERM"
)

var (
	errClosing  = errors.New("the adaptor is shutting down")
	errReplaced = errors.New("a newer session has the broker's id")
	errLapsed   = errors.New("the broker's lease is over: it was not renewed in time")
	errRemoved  = errors.New("the contract was removed meanwhile")

	errNotLeading = errors.New("this adaptor does not lead any more")
	errOwnTerm    = errors.New("this adaptor is a part of its loaddistributor, and leads with it")
	errOldTerm    = errors.New("the adaptor's term is over")
)

// badSequence: a peer sent a message that is not allowed now, or that contradicts the ledger. A new
// session brings both in line.
type badSequence struct{ err error }

func (e badSequence) Error() string { return e.err.Error() }
func (e badSequence) Unwrap() error { return e.err }

// unsettled: not every member acknowledged its share in time.
type unsettled struct {
	topic   string
	members []string // each with its reason
	cause   error
}

func (e *unsettled) Error() string {
	return fmt.Sprintf("topic %s: no acknowledgement of its share from %s: %v", e.topic, strings.Join(e.members, ", "), e.cause)
}
func (e *unsettled) Unwrap() error { return e.cause }

type badRequest = refusal.Faults

var table = refusal.Table{
	refusal.Is(errClosing, codes.Unavailable, ReasonClosing),
	refusal.Is(errNotLeading, codes.Unavailable, ReasonNotLeading),
	refusal.Is(errOldTerm, codes.FailedPrecondition, ReasonOldTerm),
	refusal.Is(errOwnTerm, codes.FailedPrecondition, ReasonOldTerm),
	refusal.Is(errReplaced, codes.Aborted, ReasonReplaced),
	refusal.Is(identity.ErrReplaced, codes.Aborted, ReasonReplaced),
	refusal.As[*identity.InUse](codes.AlreadyExists, identity.ReasonInUse),
	refusal.As[*identity.Lost](codes.Aborted, identity.ReasonLost),
	refusal.Is(errLapsed, codes.Unavailable, ReasonLapsed),
	refusal.Is(ledger.ErrConnected, codes.FailedPrecondition, ReasonConnected),
	refusal.Is(ledger.ErrMayGoOn, codes.FailedPrecondition, ReasonMayGoOn),
	refusal.Is(ledger.ErrUnknownBroker, codes.NotFound, ReasonUnknown),
	refusal.Is(errRemoved, codes.Aborted, ReasonRemoved),
	refusal.Is(bidi.ErrNoHello, codes.DeadlineExceeded, ReasonNoHello),
	refusal.Is(bidi.ErrSlow, codes.Unavailable, ReasonSlow),
	refusal.As[*unsettled](codes.Unavailable, ReasonUnsettled),
	refusal.As[*ledger.Busy](codes.Unavailable, ReasonBusy),
	refusal.As[*ledger.Conflict](codes.FailedPrecondition, ReasonConflict),
	refusal.As[badSequence](codes.Unavailable, ReasonBadSequence),
}

// toStatus maps errors to gRPC statuses; no other code chooses gRPC codes.
func toStatus(err error) error { return table.Status(err, describe) }

func describe(err error, info *errdetails.ErrorInfo) []protoadapt.MessageV1 {
	if used := (*identity.InUse)(nil); errors.As(err, &used) {
		info.Metadata = used.Metadata()
	}
	return nil
}
