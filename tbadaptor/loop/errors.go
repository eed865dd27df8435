package loop

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"

	"github.com/srtm-io/srtm/internal/identity"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/tbadaptor/ledger"
)

// Reasons in ErrorInfo. The reasons are part of the API: clients may depend on them.
const (
	ReasonBadRequest  = service.ReasonBadRequest
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

type badRequest = service.Faults

var table = service.ErrorTable{
	service.ErrorIs(errClosing, codes.Unavailable, ReasonClosing),
	service.ErrorIs(errNotLeading, codes.Unavailable, ReasonNotLeading),
	service.ErrorIs(errOldTerm, codes.FailedPrecondition, ReasonOldTerm),
	service.ErrorIs(errOwnTerm, codes.FailedPrecondition, ReasonOldTerm),
	service.ErrorIs(errReplaced, codes.Aborted, ReasonReplaced),
	service.ErrorIs(identity.ErrReplaced, codes.Aborted, ReasonReplaced),
	service.ErrorAs[*identity.InUse](codes.AlreadyExists, identity.ReasonInUse),
	service.ErrorAs[*identity.Lost](codes.Aborted, identity.ReasonLost),
	service.ErrorIs(errLapsed, codes.Unavailable, ReasonLapsed),
	service.ErrorIs(ledger.ErrConnected, codes.FailedPrecondition, ReasonConnected),
	service.ErrorIs(ledger.ErrMayGoOn, codes.FailedPrecondition, ReasonMayGoOn),
	service.ErrorIs(ledger.ErrUnknownBroker, codes.NotFound, ReasonUnknown),
	service.ErrorIs(errRemoved, codes.Aborted, ReasonRemoved),
	service.ErrorIs(service.ErrNoHello, codes.DeadlineExceeded, ReasonNoHello),
	service.ErrorIs(service.ErrSlow, codes.Unavailable, ReasonSlow),
	service.ErrorAs[*unsettled](codes.Unavailable, ReasonUnsettled),
	service.ErrorAs[*ledger.Busy](codes.Unavailable, ReasonBusy),
	service.ErrorAs[*ledger.Conflict](codes.FailedPrecondition, ReasonConflict),
	service.ErrorAs[badSequence](codes.Unavailable, ReasonBadSequence),
}

// toStatus maps errors to gRPC statuses; no other code chooses gRPC codes.
func toStatus(err error) error { return table.Status(err, describe) }

func describe(err error, info *errdetails.ErrorInfo) []protoadapt.MessageV1 {
	if used := (*identity.InUse)(nil); errors.As(err, &used) {
		info.Metadata = used.Metadata()
	}
	return nil
}
